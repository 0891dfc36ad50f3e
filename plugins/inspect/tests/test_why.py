"""`engine plugins why`: every candidate with a verdict and a reason."""

from __future__ import annotations

import json

import pytest
from core.tests.cli.strangers import install


@pytest.fixture
def moon(tmp_path, monkeypatch):
    install(tmp_path, "sound", "unfit", "broken")
    install(tmp_path, "stranger", major=4, distribution="engine-mars")
    monkeypatch.syspath_prepend(str(tmp_path))


def asked(program, *arguments):
    code, out, err = program("plugins", "why", *arguments, "--json")
    report = json.loads(out)
    best = {row["driver"]: row for row in reversed(report["candidates"])}  # of what is said of its kinds
    return code, best, report["error"], err


def test_every_candidate_has_a_verdict(program, moon):
    code, rows, error, _ = asked(program, "evictor")
    assert code == 0 and error is None
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == {
        "lru": "chosen", "prefix": "fits", "cacheblend": "unfit", "sound": "fits",
        "unfit": "unfit", "broken": "broken", "stranger": "outdated",
    }  # fmt: skip
    assert rows["lru"]["reasons"] == ["auto, priority 0"]
    assert rows["sound"]["reasons"] == ["'lru' has priority 0"] and rows["sound"]["priority"] == -50
    assert rows["cacheblend"]["reasons"] == ["it has to be asked for by name"]
    assert rows["unfit"]["reasons"] == ["the moon is not full"]
    assert "module_that_nobody_has" in rows["broken"]["reasons"][0] and rows["broken"]["distribution"] == "engine-moon"
    assert rows["stranger"]["reasons"] == ["it speaks v4, this core serves v0"]


def test_the_one_who_was_asked_for(program, moon):
    _, rows, _, _ = asked(program, "evictor", "--evictor", "sound")
    assert rows["sound"]["verdict"] == "chosen" and rows["sound"]["reasons"] == ["asked for"]
    assert rows["lru"]["reasons"] == ["'sound' was asked for"]


def test_a_start_that_fails_is_explained_all_the_same(program, moon):
    code, rows, error, err = asked(program, "evictor", "--evictor", "unfit")
    assert code == 2 and "the moon is not full" in error and "the moon is not full" in err
    assert rows["broken"]["verdict"] == "broken" and rows["lru"]["verdict"] == "unused"


def test_the_table(program, moon):
    code, out, _ = program("plugins", "why", "evictor", "tiny")
    first, head, chosen, *_ = out.splitlines()
    assert code == 0 and first.startswith("evictor, for tiny in ")
    assert head.split() == ["candidate", "distribution", "version", "priority", "verdict", "reasons"]
    assert chosen.split() == ["lru", "engine-reference", "0.1.0", "0", "chosen", "auto,", "priority", "0"]


def test_kinds_and_operations(program):
    _, rows, _, _ = asked(program, "attention", "--attention", "full=torch")
    assert rows["torch"]["verdict"] == "chosen" and rows["torch"]["kinds"] == ["full"]
    _, rows, _, _ = asked(program, "ops", "--ops", "torch", "--dtype", "float64")
    assert "linear" in rows["torch"]["kinds"] and rows["torch"]["reasons"] == ["asked for"]


def test_whoever_does_not_claim_the_model_and_whoever_is_not_used(program):
    _, rows, _, _ = asked(program, "checkpoint", "dummy:0.6B,vocab=32000")
    assert (
        rows["tiny"]["reasons"] == ["does not claim 'dummy:0.6B,vocab=32000'"] and rows["dummy"]["verdict"] == "chosen"
    )
    _, rows, _, _ = asked(program, "router")
    assert rows["least_loaded"]["verdict"] == "fits" and "no driver of this point is at work" in str(rows)
    _, rows, _, _ = asked(program, "model")
    assert rows["Qwen3ForCausalLM"]["reasons"] == ["it is for another architecture"]


def test_where_nothing_is_named_and_none_is_at_work_the_cards_are_asked(program, tmp_path, monkeypatch):
    install(tmp_path, "deep", "raises", point="drafter", major=1)
    monkeypatch.syspath_prepend(str(tmp_path))
    _, rows, _, _ = asked(program, "drafter")
    assert [rows[name]["verdict"] for name in ("ngram", "deep", "raises")] == ["fits", "unfit", "broken"]
    assert rows["ngram"]["reasons"][0].endswith("; name one with --drafter")
    assert "'hidden_states'" in rows["deep"]["reasons"][0] and "moon_raises.py" in rows["raises"]["reasons"][0]
    _, rows, _, _ = asked(program, "quantization")
    assert rows["absmax"]["verdict"] == "fits" and rows["absmax"]["kinds"] == ["linear", "head"]
    _, rows, _, _ = asked(program, "reasoning_parser")
    assert rows["qwen3"]["reasons"] == ["the model's chat template has nothing of its form"]


@pytest.mark.parametrize("settings", [(), ("--quantization", "absmax")])
def test_a_driver_is_not_held_to_kinds_that_it_does_not_serve(program, settings):
    """One that serves some of the kinds has a line for those, and none for the others."""
    _, out, _ = program("plugins", "why", "quantization", *settings, "--json")
    drivers = [row["driver"] for row in json.loads(out)["candidates"]]
    assert {"absmax", "gguf", "stored"} <= set(drivers) and len(drivers) == len(set(drivers))
    assert "not embedding" not in out


def test_two_of_a_name_stop_nobody_who_does_not_take_them(program, tmp_path, monkeypatch):
    for distribution in ("engine-moon", "engine-mars"):
        install(tmp_path, "sound", distribution=distribution)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, rows, _, _ = asked(program, "evictor")
    assert code == 0 and rows["lru"]["verdict"] == "chosen" and rows["sound"]["verdict"] == "duplicate"
    assert "engine-moon 1.2" in rows["sound"]["reasons"][0] and "engine-mars 1.2" in rows["sound"]["reasons"][0]
    _, out, _ = program("plugins")
    assert len([line for line in out.splitlines() if "sound" in line and "offered more than once" in line]) == 2
    code, rows, error, _ = asked(program, "evictor", "--evictor", "sound")
    assert code == 2 and "it is offered more than once" in error and rows["sound"]["verdict"] == "duplicate"


def test_slips(program):
    code, _, err = program("plugins", "why", "atention")
    assert code == 2 and "did you mean 'attention'" in err
    code, _, err = program("plugins", "wy")
    assert code == 2 and "'plugins why'" in err


FAST_LLAMA = """
from engine_reference.models.llama_card import Llama


class Card(Llama):
    priority = {priority}
"""


@pytest.mark.parametrize("priority", [10, -10, 0])
def test_a_stranger_s_llama_beside_ours(program, tmp_path, monkeypatch, priority):
    module = f"fast_llama_{priority + 10}"
    (tmp_path / f"{module}.py").write_text(FAST_LLAMA.format(priority=priority))
    info = tmp_path / "engine_fast-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-fast\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[engine.model.v0]\nLlamaForCausalLM = {module}:Card\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = program("plugins", "why", "model", "tiny")
    lines = [line for line in out.splitlines() if line.startswith("LlamaForCausalLM ")]
    rows = [line.split(maxsplit=5) for line in lines if "the platform with torch" not in line]
    if priority == 0:
        assert code == 2 and "engine-fast 1.2" in err and "engine-reference 0.1.0" in err
        return
    ours, theirs = "engine-reference", "engine-fast"
    first, second = (theirs, ours) if priority > 0 else (ours, theirs)
    assert code == 0 and [(row[1], row[4]) for row in rows] == [(first, "chosen"), (second, "fits")]
    assert rows[0][5].startswith("it has the model's architecture")
    assert rows[1][5].startswith(f"that of {first} ") and rows[1][5].endswith(f"has priority {max(priority, 0)}")
    assert "more than once" not in program("plugins")[1]
    code, _, err = program("generate", "--model", "tiny", "--max-tokens", "2", "hi")
    assert code == 0, err
