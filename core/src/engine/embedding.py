"""What programs that embed the engine (its server, chat, the benchmarks, yours) may import, and nothing behind it.

    from engine.embedding import EngineConfig, LLMEngine

Importing this module is light: each name is imported when it is first asked for, so a command may name here what it
needs at once (its settings) without waiting for what an engine needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.cli.main import OPTION as OPTION
    from engine.config.declaration import EngineSettings as EngineSettings
    from engine.config.declaration import Setting as Setting
    from engine.config.declaration import Settings as Settings
    from engine.config.declaration import of_commands as of_commands
    from engine.config.declaration import setting as setting
    from engine.config.declaration import settings_of_commands as settings_of_commands
    from engine.config.settings import Config as Config
    from engine.config.settings import EngineConfig as EngineConfig
    from engine.config.settings import model_of as model_of
    from engine.config.settings import validated as validated
    from engine.config.sources import Key as Key
    from engine.config.sources import Merged as Merged
    from engine.config.sources import gather as gather
    from engine.frontend.assemble import Attached as Attached
    from engine.frontend.assemble import Frontend as Frontend
    from engine.frontend.assemble import assemble_frontend as assemble_frontend
    from engine.frontend.assemble import broken_plugins as broken_plugins
    from engine.frontend.assemble import capacity as capacity
    from engine.frontend.assemble import longest as longest
    from engine.frontend.assemble import start_cores as start_cores
    from engine.frontend.input_processor import InputProcessor as InputProcessor
    from engine.frontend.input_processor import Prompt as Prompt
    from engine.frontend.input_processor import TextPrompt as TextPrompt
    from engine.frontend.input_processor import as_prompts as as_prompts
    from engine.frontend.input_processor import check_truncation as check_truncation
    from engine.frontend.input_processor import parse_prompt as parse_prompt
    from engine.frontend.launch import Launch as Launch
    from engine.frontend.launch import check_attached as check_attached
    from engine.frontend.launch import launch as launch
    from engine.frontend.request_state import OutputKind as OutputKind
    from engine.frontend.request_state import RequestState as RequestState
    from engine.frontend.request_state import RequestStream as RequestStream
    from engine.frontend.request_state import SequenceState as SequenceState
    from engine.frontend.statistics import RequestObserver as RequestObserver
    from engine.llm import LLMEngine as LLMEngine

NAMES = {
    # what most programs need
    "llm": ("LLMEngine",),
    "frontend.request_state": ("OutputKind", "RequestState", "RequestStream", "SequenceState"),
    "config.settings": ("Config", "EngineConfig", "model_of", "validated"),
    # commands and their settings
    "cli.main": ("OPTION",),
    "config.declaration": (
        *("EngineSettings", "Setting", "Settings", "setting"),
        *("of_commands", "settings_of_commands"),
    ),
    "config.sources": ("Key", "Merged", "gather"),
    # what was chosen at the start, and how it goes
    "frontend.launch": ("Launch", "check_attached", "launch"),
    "frontend.statistics": ("RequestObserver",),
    # requests, before they are sent
    "frontend.input_processor": (
        *("InputProcessor", "Prompt", "TextPrompt", "as_prompts", "check_truncation", "parse_prompt"),
    ),
    # several processes in front of several cores
    "frontend.assemble": (
        "Attached",
        "Frontend",
        "assemble_frontend",
        "broken_plugins",
        "capacity",
        "longest",
        "start_cores",
    ),
}
_HOMES = {name: f"engine.{module}" for module, names in NAMES.items() for name in names}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
