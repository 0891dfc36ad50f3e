"""Conformance suites: one pytest class a point, which an author subclasses in three lines.

    from engine_sdk.conformance import AttentionConformance

    class TestMyAttention(AttentionConformance):
        driver = "my-attention"

A suite asks the driver's card before each test whether it serves what the test needs, and skips with the card's own
reason where it does not: what a driver cannot do is said once, on its card. The names here are imported when they are
first used, so that a suite brings only what it needs (that of evictors, no torch).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

# Before any suite is imported: a failed assertion of a suite then shows its values, as one of a test's own does.
_TESTING = (
    *("base", "attention", "ops", "communicator", "evictor", "drafter", "grammar", "scheduling_policy", "router"),
    *("logits_processor", "executor", "platform", "checkpoint", "quantization", "kv_connector", "model", "tokenizer"),
    *("tool_parser", "reasoning_parser", "experts", "adapter", "nodes"),
)
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _TESTING))

if TYPE_CHECKING:
    from engine_sdk.conformance.adapter import AdapterConformance
    from engine_sdk.conformance.attention.suite import AttentionConformance, AttentionThorough
    from engine_sdk.conformance.base import Conformance
    from engine_sdk.conformance.checkpoint import CheckpointConformance
    from engine_sdk.conformance.communicator.suite import CommunicatorConformance, CommunicatorThorough
    from engine_sdk.conformance.drafter import DrafterConformance
    from engine_sdk.conformance.evictor import EvictorConformance
    from engine_sdk.conformance.executor.suite import ExecutorConformance
    from engine_sdk.conformance.experts import ExpertsConformance
    from engine_sdk.conformance.grammar.suite import GrammarConformance
    from engine_sdk.conformance.kv_connector.suite import KVConnectorConformance
    from engine_sdk.conformance.logits_processor import LogitsProcessorConformance
    from engine_sdk.conformance.model.encoder import EncoderModelConformance
    from engine_sdk.conformance.model.encoder_decoder import EncoderDecoderConformance
    from engine_sdk.conformance.model.served import ServedModelConformance
    from engine_sdk.conformance.model.suite import ModelConformance
    from engine_sdk.conformance.nodes import NodesConformance
    from engine_sdk.conformance.ops.suite import OpsAround, OpsConformance, OpsThorough
    from engine_sdk.conformance.platform import PlatformConformance
    from engine_sdk.conformance.quantization import QuantizationConformance
    from engine_sdk.conformance.reasoning_parser import ReasoningParserConformance
    from engine_sdk.conformance.router import RouterConformance
    from engine_sdk.conformance.scheduling_policy import SchedulingPolicyConformance
    from engine_sdk.conformance.tokenizer import TokenizerConformance
    from engine_sdk.conformance.tool_parser import ToolParserConformance

__all__ = [
    "SUITES",
    "VARIANTS",
    "AdapterConformance",
    "AttentionConformance",
    "AttentionThorough",
    "CheckpointConformance",
    "CommunicatorConformance",
    "CommunicatorThorough",
    "Conformance",
    "DrafterConformance",
    "EncoderDecoderConformance",
    "EncoderModelConformance",
    "EvictorConformance",
    "ExecutorConformance",
    "ExpertsConformance",
    "GrammarConformance",
    "KVConnectorConformance",
    "LogitsProcessorConformance",
    "ModelConformance",
    "NodesConformance",
    "OpsAround",
    "OpsConformance",
    "OpsThorough",
    "PlatformConformance",
    "QuantizationConformance",
    "ReasoningParserConformance",
    "RouterConformance",
    "SchedulingPolicyConformance",
    "ServedModelConformance",
    "TokenizerConformance",
    "ToolParserConformance",
]

SUITES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("AttentionConformance", "AttentionThorough"),
        "ops": ("OpsConformance", "OpsAround", "OpsThorough"),
        "communicator": ("CommunicatorConformance", "CommunicatorThorough"),
        "evictor": ("EvictorConformance",),
        "drafter": ("DrafterConformance",),
        "grammar": ("GrammarConformance",),
        "scheduling_policy": ("SchedulingPolicyConformance",),
        "router": ("RouterConformance",),
        "logits_processor": ("LogitsProcessorConformance",),
        "executor": ("ExecutorConformance",),
        "nodes": ("NodesConformance",),
        "platform": ("PlatformConformance",),
        "checkpoint": ("CheckpointConformance",),
        "quantization": ("QuantizationConformance",),
        "experts": ("ExpertsConformance",),
        "adapter": ("AdapterConformance",),
        "kv_connector": ("KVConnectorConformance",),
        "model": ("ModelConformance",),
        "tokenizer": ("TokenizerConformance",),
        "tool_parser": ("ToolParserConformance",),
        "reasoning_parser": ("ReasoningParserConformance",),
    }
)
"""For each point that has one, the suite, and the mixin with its long ranges where there is one."""

VARIANTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"model": ("EncoderModelConformance", "EncoderDecoderConformance", "ServedModelConformance")}
)
"""Further suites of a point, in the place of the first for some of its drivers (`Conformance.suite_for`)."""

_HOMES = {
    "AdapterConformance": "adapter",
    "AttentionConformance": "attention.suite",
    "AttentionThorough": "attention.suite",
    "CommunicatorConformance": "communicator.suite",
    "CommunicatorThorough": "communicator.suite",
    "CheckpointConformance": "checkpoint",
    "Conformance": "base",
    "DrafterConformance": "drafter",
    "EncoderDecoderConformance": "model.encoder_decoder",
    "EncoderModelConformance": "model.encoder",
    "EvictorConformance": "evictor",
    "ExecutorConformance": "executor.suite",
    "ExpertsConformance": "experts",
    "GrammarConformance": "grammar.suite",
    "KVConnectorConformance": "kv_connector.suite",
    "LogitsProcessorConformance": "logits_processor",
    "ModelConformance": "model.suite",
    "NodesConformance": "nodes",
    "OpsAround": "ops.suite",
    "OpsConformance": "ops.suite",
    "OpsThorough": "ops.suite",
    "PlatformConformance": "platform",
    "QuantizationConformance": "quantization",
    "RouterConformance": "router",
    "SchedulingPolicyConformance": "scheduling_policy",
    "ServedModelConformance": "model.served",
    "TokenizerConformance": "tokenizer",
    "ToolParserConformance": "tool_parser",
    "ReasoningParserConformance": "reasoning_parser",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
