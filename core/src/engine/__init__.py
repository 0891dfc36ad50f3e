"""Engine: LLM inference and serving in which every part is a plugin.

    from engine import LLM, SamplingParams

Importing this package is light: each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config.settings import EngineArgs, EngineConfig
    from engine.frontend.async_llm import AsyncLLM
    from engine.llm import LLM, LLMEngine
    from engine.types.beam import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from engine.types.outputs import CompletionOutput, RequestOutput
    from engine.types.params import SamplingParams
    from engine.types.pooling import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from engine.types.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
    "errors",
]

_HOMES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.frontend.async_llm",
    "LLMEngine": "engine.llm",
    "EngineArgs": "engine.config.settings",
    "EngineConfig": "engine.config.settings",
    "SamplingParams": "engine.types.params",
    "StructuredOutputsParams": "engine.types.structured_outputs",
    "BeamSearchParams": "engine.types.beam",
    "BeamSearchOutput": "engine.types.beam",
    "BeamSearchSequence": "engine.types.beam",
    "RequestOutput": "engine.types.outputs",
    "CompletionOutput": "engine.types.outputs",
    "PoolingParams": "engine.types.pooling",
    "PoolingRequestOutput": "engine.types.pooling",
    "EmbeddingRequestOutput": "engine.types.pooling",
    "ClassificationRequestOutput": "engine.types.pooling",
    "ScoringRequestOutput": "engine.types.pooling",
}


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("engine-base")
    elif name == "errors":
        value = importlib.import_module("engine.errors")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
