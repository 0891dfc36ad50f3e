"""What is said where Ray is not installed, and what `--executor ray` stands for. No Ray is needed."""

from __future__ import annotations

import pytest

from engine.embedding import EngineConfig, launch
from engine.interfaces.nodes import NodesNeed
from engine.plugin.points import EXECUTOR, NODES
from engine.types.errors import EngineError
from engine_ray import card
from engine_ray.card import RayNodes


@pytest.mark.parametrize("asked", [{"executor": "ray"}, {"nodes": "ray"}])
def test_what_is_missing_is_said(asked: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "find_spec", lambda name: None)
    assert RayNodes.unsupported(NodesNeed()) == ['ray is not installed: pip install "ray>=2.50"']
    with pytest.raises(EngineError, match=r"pip install \"ray>=2\.50\""):
        launch(EngineConfig(model="tiny", tensor_parallel_size=2, **asked))


def test_the_executor_brings_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's users know it; options of both are taken, and another driver of nodes may be named."""
    monkeypatch.setattr(card, "find_spec", lambda name: name)
    settings = {"model": "tiny", "tensor_parallel_size": 2, "executor": "ray"}
    options = {"executor": {"step_timeout": 9.0}, "nodes": {"address": "auto"}}
    plan = launch(EngineConfig(**settings, options=options))
    (executor,), (nodes,) = plan.chosen(EXECUTOR), plan.chosen(NODES)
    assert (executor.candidate.name, nodes.candidate.name) == ("ray", "ray")
    assert executor.card.body == "engine_reference.executor_process.body:Process"
    assert (executor.options.step_timeout, nodes.options.address) == (9.0, "auto")
    assert launch(EngineConfig(**settings, nodes="local")).chosen(NODES)[0].candidate.name == "local"
    assert launch(EngineConfig(model="tiny")).chosen(NODES)[0].candidate.name == "local"
