"""What programs that embed the engine (its server, chat, the benchmarks, yours) may import, and nothing behind it.

    from engine.embedding import AsyncLLM, EngineConfig

Importing this module is light: each name is imported when it is first asked for, so a command may name here what it
needs at once (flags, settings) without waiting for what an engine needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.cli.flags import add_engine_flags as add_engine_flags
    from engine.cli.flags import add_plugin_flags as add_plugin_flags
    from engine.cli.flags import add_positional_model as add_positional_model
    from engine.cli.flags import add_settings as add_settings
    from engine.cli.flags import command_settings as command_settings
    from engine.cli.flags import name_positional_model as name_positional_model
    from engine.config.declaration import EngineSettings as EngineSettings
    from engine.config.declaration import Setting as Setting
    from engine.config.declaration import Settings as Settings
    from engine.config.declaration import setting as setting
    from engine.config.settings import Config as Config
    from engine.config.settings import EngineConfig as EngineConfig
    from engine.config.settings import model_of as model_of
    from engine.config.settings import validated as validated
    from engine.config.sources import Merged as Merged
    from engine.frontend.assemble import start_cores as start_cores
    from engine.frontend.async_llm import AsyncLLM as AsyncLLM
    from engine.frontend.capacity import broken_plugins as broken_plugins
    from engine.frontend.capacity import capacity as capacity
    from engine.frontend.capacity import longest as longest
    from engine.frontend.client import Attached as Attached
    from engine.frontend.input_processor import check_task as check_task
    from engine.frontend.launch import Launch as Launch
    from engine.frontend.launch import launch as launch
    from engine.frontend.offline import DeferredInterrupt as DeferredInterrupt
    from engine.frontend.pooling import data_of as data_of
    from engine.frontend.process_client import LoopListener as LoopListener
    from engine.frontend.process_client import ProcessClient as ProcessClient
    from engine.frontend.prompts import LONG as LONG
    from engine.frontend.prompts import Prompt as Prompt
    from engine.frontend.prompts import TextPrompt as TextPrompt
    from engine.frontend.request_checks import ConstraintCheck as ConstraintCheck
    from engine.frontend.request_state import OutputKind as OutputKind
    from engine.frontend.request_state import RequestState as RequestState
    from engine.frontend.request_state import RequestStream as RequestStream
    from engine.frontend.request_state import SequenceState as SequenceState
    from engine.frontend.statistics import INTERVAL as INTERVAL
    from engine.frontend.statistics import NOTHING as NOTHING
    from engine.frontend.statistics import Interval as Interval
    from engine.frontend.statistics import Observed as Observed
    from engine.frontend.statistics import RequestObserver as RequestObserver
    from engine.llm import LLM as LLM
    from engine.llm import LLMEngine as LLMEngine

NAMES = {
    # what most programs need
    "llm": ("LLM", "LLMEngine"),
    "frontend.async_llm": ("AsyncLLM",),
    "frontend.request_state": ("OutputKind", "RequestState", "RequestStream", "SequenceState"),
    "frontend.prompts": ("LONG", "Prompt", "TextPrompt"),
    "config.settings": ("Config", "EngineConfig", "model_of", "validated"),
    # commands and their settings
    "cli.flags": (
        "add_engine_flags",
        "add_plugin_flags",
        "add_positional_model",
        "add_settings",
        "command_settings",
        "name_positional_model",
    ),
    "config.declaration": ("EngineSettings", "Setting", "Settings", "setting"),
    "config.sources": ("Merged",),
    "frontend.offline": ("DeferredInterrupt",),
    # what was chosen at the start, and how it goes
    "frontend.capacity": ("broken_plugins", "capacity", "longest"),
    "frontend.launch": ("Launch", "launch"),
    "frontend.statistics": ("INTERVAL", "Interval", "NOTHING", "Observed", "RequestObserver"),
    # requests, before they are sent
    "frontend.request_checks": ("ConstraintCheck",),
    "frontend.input_processor": ("check_task",),
    "frontend.pooling": ("data_of",),
    # several processes in front of several cores
    "frontend.assemble": ("start_cores",),
    "frontend.client": ("Attached",),
    "frontend.process_client": ("LoopListener", "ProcessClient"),
}
_HOMES = {name: f"engine.{module}" for module, names in NAMES.items() for name in names}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
