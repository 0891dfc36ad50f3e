"""The driver in README is what a reader would type: installed as it stands, it is chosen, and it decides."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.cli.main import main
from tests.docs.installing import install, put_on_path
from tests.docs.markdown import ROOT, files


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


def test_the_driver_is_found_with_its_distribution(folder, monkeypatch, capsys):
    put_on_path(monkeypatch, folder)
    assert main(["plugins", "--json", "--logits-processors", "no-stutter"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out)["drivers"] if row["driver"] == "no-stutter"]
    assert [(row["distribution"], row["version"]) for row in rows] == [("engine-nostutter", "0.1.0")]
    assert rows[0]["choice"] == "asked (flag --logits-processors)"


def test_it_decides_what_follows(folder, monkeypatch):
    put_on_path(monkeypatch, folder)
    with LLM(model="tiny", num_kv_pages=40, logits_processors="no-stutter") as llm:
        word = llm.get_tokenizer().encode(" a", add_special_tokens=False)[-1]  # made so likely that it repeats itself
        asked = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logit_bias": {word: 100}}
        params = [
            SamplingParams(**asked),
            *(SamplingParams(**asked, extra_args={"no_stutter": True}) for _ in range(2)),
        ]
        outputs = llm.generate(["Hello", "Hello", "Once upon"], params, use_tqdm=False)
    free, *held = [output.outputs[0].token_ids for output in outputs]
    assert len(set(free)) == 1
    for tokens in held:
        assert len(tokens) == 8 and all(a != b for a, b in itertools.pairwise(tokens))


def test_without_the_distribution_it_is_refused(capsys):
    assert main(["generate", "--logits-processors", "no-stutter", "Hello"]) == 2
    said = capsys.readouterr().err
    assert "no-stutter" in said and "logits_processor" in said
