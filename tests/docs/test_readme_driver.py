"""The driver in README is what a reader would type: installed as it stands, it is chosen, and it decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.installing import install, run
from tests.docs.markdown import ROOT, files

ORDER = """
import sys
from engine import EngineArgs, LLMEngine, SamplingParams

with LLMEngine.from_engine_args(EngineArgs(max_num_seqs=1, scheduling_policy=sys.argv[1])) as engine:
    for name, words in (("long", 40), ("middle", 20), ("gone", 1), ("short", 3)):
        engine.add_request(name, "word " * words, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.abort_request("gone")
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                print(output.request_id, len(output.outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's distribution."""
    found = files(ROOT / "README.md")
    assert sorted(found) == ["engine_shortest.py", "pyproject.toml"]
    made = tmp_path_factory.mktemp("readme")
    install(found, made)
    return made


def test_the_driver_is_found_with_its_distribution(folder, tmp_path):
    listed = run(["-m", "engine", "plugins", "--json", "--scheduling-policy", "shortest"], folder, tmp_path)
    assert listed.returncode == 0, listed.stderr
    rows = [row for row in json.loads(listed.stdout)["drivers"] if row["driver"] == "shortest"]
    assert [(row["distribution"], row["version"]) for row in rows] == [("engine-shortest", "0.1.0")]
    assert rows[0]["choice"] == "asked (flag --scheduling-policy)"


def test_one_request_runs_with_it(folder, tmp_path):
    arguments = ["generate", "--scheduling-policy", "shortest", "Hello", "--max-tokens", "4", "--ignore-eos"]
    done = run(["-m", "engine", *arguments], folder, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_it_decides_who_goes_first(folder, tmp_path):
    expected = {"fcfs": ["long 4", "middle 4", "short 4"], "shortest": ["short 4", "middle 4", "long 4"]}
    for policy, order in expected.items():
        done = run(["-c", ORDER, policy], folder, tmp_path)
        assert done.stdout.splitlines() == order, done.stderr


def test_without_the_distribution_it_is_refused(tmp_path):
    done = run(["-m", "engine", "generate", "--scheduling-policy", "shortest", "Hello"], tmp_path, tmp_path)
    assert done.returncode == 2
    assert "use driver 'shortest' for scheduling_policy" in done.stderr
