"""The driver in README is what a reader would type: installed as it stands, it is chosen, and it decides."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.docs.installing import install, run
from tests.docs.markdown import ROOT, files

TOKENS = """
import json, sys
from engine import LLM, SamplingParams

with LLM(model="tiny", num_kv_pages=40, logits_processors=sys.argv[1]) as llm:
    word = llm.get_tokenizer().encode(" a", add_special_tokens=False)[-1]  # made so likely that it repeats itself
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={word: 100})
    held = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logit_bias={word: 100}, extra_args={"no_stutter": True}
    )
    outputs = llm.generate(["Hello", "Hello", "Once upon"], [free, held, held], use_tqdm=False)
    print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's distribution."""
    found = files(ROOT / "README.md")
    assert sorted(found) == ["engine_nostutter.py", "pyproject.toml"]
    made = tmp_path_factory.mktemp("readme")
    install(found, made)
    return made


def test_it_is_as_short_as_it_looks():
    code = files(ROOT / "README.md")["engine_nostutter.py"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


def test_the_driver_is_found_with_its_distribution(folder, tmp_path):
    listed = run(["-m", "engine", "plugins", "--json", "--logits-processors", "no-stutter"], folder, tmp_path)
    assert listed.returncode == 0, listed.stderr
    rows = [row for row in json.loads(listed.stdout)["drivers"] if row["driver"] == "no-stutter"]
    assert [(row["distribution"], row["version"]) for row in rows] == [("engine-nostutter", "0.1.0")]
    assert rows[0]["choice"] == "asked (flag --logits-processors)"


def test_it_decides_what_follows(folder, tmp_path):
    done = run(["-c", TOKENS, "no-stutter"], folder, tmp_path)
    assert done.returncode == 0, done.stderr
    free, *held = json.loads(done.stdout.splitlines()[-1])
    assert len(set(free)) == 1
    for tokens in held:
        assert len(tokens) == 8 and all(a != b for a, b in itertools.pairwise(tokens))


def test_without_the_distribution_it_is_refused(tmp_path):
    done = run(["-m", "engine", "generate", "--logits-processors", "no-stutter", "Hello"], tmp_path, tmp_path)
    assert done.returncode == 2
    assert "no-stutter" in done.stderr and "logits_processor" in done.stderr
