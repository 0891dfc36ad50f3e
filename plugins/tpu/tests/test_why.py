"""`engine plugins why` under `--platform tpu`: who serves each point, and why others do not."""

from __future__ import annotations

import json

import msgspec
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from engine.__main__ import main
from engine.embedding import EngineConfig, launch
from engine.plugin import POINTS, Registry
from engine.types.errors import ConfigError
from engine_tpu.platform import OWN_POINTS
from engine_tpu.worker import JaxWorker

AT_WORK = {
    "platform": {"tpu"},
    "model": {"LlamaForCausalLM"},
    "executor": {"inline"},
    "nodes": {"local"},
    "evictor": {"lru"},
    "checkpoint": {"tiny"},
    "tokenizer": {"hf"},
    "scheduling_policy": {"fcfs"},
    "grammar": {"choice"},
    "tool_parser": {"hermes"},
}
"""Whose drivers serve there as elsewhere, of those that come with the engine; others may be installed beside."""
NOBODY = {"adapter", "communicator", "drafter", "kv_connector", "reasoning_parser", "router"}
"""Points of which nobody is at work with these settings."""
COMPUTES = "it computes with torch, the platform with jax"


@pytest.mark.parametrize("point", POINTS)
def test_every_point(point: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each point is the worker's own, or has somebody at work, or nobody; and every candidate has its reasons."""
    code = main(["plugins", "why", point, "tiny", "--platform", "tpu", "--platform.device", "cpu", "--json"])
    told = json.loads(capsys.readouterr().out)
    candidates = told["candidates"]
    assert code == 0 and told["error"] is None and candidates
    assert all(one["reasons"] and all(one["reasons"]) for one in candidates)
    chosen = {one["driver"] for one in candidates if one["verdict"] == "chosen"}
    if point in OWN_POINTS:
        own = "the worker of platform 'tpu' brings its own"
        assert not chosen and {reason for one in candidates for reason in one["reasons"]} == {own}
    elif point in NOBODY:
        assert not chosen
    else:
        assert chosen >= AT_WORK[point]
    if point in ("adapter", "communicator"):
        assert all(COMPUTES in one["reasons"] for one in candidates)
    if point == "kv_connector":
        reasons = {one["driver"]: one["reasons"] for one in candidates}
        assert COMPUTES not in reasons["file"] + reasons["redis"] + reasons["host"] and COMPUTES in reasons["tcp"]
    if point == "drafter":
        verdicts = {one["driver"]: one["verdict"] for one in candidates}
        assert {verdicts["ngram"], verdicts["suffix"]} == {"fits"} and verdicts["eagle"] == "unfit"
        (eagle,) = (one["reasons"] for one in candidates if one["driver"] == "eagle")
        assert COMPUTES in eagle and "it needs 'hidden', which is not offered here" in eagle
    if point == "model":
        torch = [one for one in candidates if one["driver"] == "LlamaForCausalLM" and one["verdict"] != "chosen"]
        assert [one["reasons"] for one in torch] == [[COMPUTES]]


def test_trees_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher would let a drafter pass that reads tokens alone and proposes trees of them."""
    config = EngineConfig(model="tiny", platform="tpu", drafter="ngram", options={"platform": {"device": "cpu"}})
    registry = Registry.discover()
    start = launch(config, registry).start.worker
    (ngram,) = (one for one in registry.candidates("drafter") if one.name == "ngram")
    monkeypatch.setattr(registry.card(ngram), "branches", classmethod(lambda cls, options: True))
    with pytest.raises(ConfigError, match="drafter=ngram.*attention computes chains"):
        JaxWorker(start, registry).start()


def test_a_driver_of_no_framework() -> None:
    """The launcher would let it pass; the worker refuses a driver that it has no place for."""
    config = EngineConfig(model="tiny", platform="tpu", options={"platform": {"device": "cpu"}})
    registry = Registry.discover()
    start = launch(config, registry).start.worker
    for point in ("adapter", "logits_processor"):
        candidate = registry.candidates(point)[0]
        beside = msgspec.structs.replace(start, choices=(*start.choices, candidate.choice(kind="", options=None)))
        with pytest.raises(ConfigError, match=f"{point}={candidate.name}"):
            JaxWorker(beside, registry).start()
