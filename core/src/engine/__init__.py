"""Engine: LLM inference and serving in which every part is a plugin.

    from engine import LLM, SamplingParams

Importing this package is light: each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config.settings import EngineArgs as EngineArgs
    from engine.config.settings import EngineConfig as EngineConfig
    from engine.llm import LLMEngine as LLMEngine
    from engine.types.outputs import CompletionOutput as CompletionOutput
    from engine.types.outputs import RequestOutput as RequestOutput
    from engine.types.params import SamplingParams as SamplingParams
    from engine.types.pooling import PoolingParams as PoolingParams
    from engine.types.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from engine_kit.async_llm import AsyncLLM as AsyncLLM
    from engine_kit.llm import LLM as LLM

_NAMES = {
    "config.settings": ("EngineArgs", "EngineConfig"),
    "llm": ("LLMEngine",),
    "types.outputs": ("CompletionOutput", "RequestOutput"),
    "types.params": ("SamplingParams",),
    "types.pooling": ("PoolingParams",),
    "types.structured_outputs": ("StructuredOutputsParams",),
}
_HOMES = {name: f"engine.{module}" for module, names in _NAMES.items() for name in names}
_PARTS = {"LLM": "llm", "AsyncLLM": "async_llm"}  # that packages bring, see `engine.plugin.loading.brought`
__all__ = ["LLM", "AsyncLLM", "__version__", "errors"]
__all__.extend(_HOMES)


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("engine-base")
    elif name in _PARTS:
        value = importlib.import_module("engine.plugin.loading").brought(_PARTS[name], f"use engine.{name}")
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
