"""`engine chat [MODEL]`: the command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.plugin.card import Command
from engine.types.errors import ConfigError, InvalidRequestError
from engine_chat.sampling_flags import add_sampling_flags, sampling_keywords
from engine_chat.settings import ChatSettings
from engine_kit.flags import (
    add_engine_flags,
    add_positional_model,
    add_settings,
    command_settings,
    name_positional_model,
)

if TYPE_CHECKING:
    from engine.embedding import Merged
    from engine_chat.backend import Backend

HISTORY = "chat_history"
_OF_THE_CLIENT = frozenset({"model", "seed", "api_key"})
"""The settings that mean something when a server answers."""


class ChatCommand(Command):
    """Talk to a model: to one that is loaded here, or to a server's."""

    help = "Talk to a model in the terminal: loaded in this process, or behind a server's --url."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_positional_model(parser)
        chat = parser.add_argument_group("chat")
        chat.add_argument("--system", metavar="TEXT", help="the system prompt")
        chat.add_argument("-q", "--quick", metavar="TEXT", help="ask this alone, and leave")
        chat.add_argument("--url", metavar="URL", help="talk to this server, e.g. http://127.0.0.1:8000/v1")
        add_settings(chat, ChatSettings.declared)
        add_sampling_flags(parser, max_tokens=None)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        name_positional_model(arguments, "chat with")
        merged = command_settings(arguments)
        url: str | None = getattr(arguments, "url", None)
        interactive = sys.stdin.isatty() and sys.stdout.isatty() and not hasattr(arguments, "quick")
        keywords = sampling_keywords(arguments)
        if url is None:
            backend = _embedded(merged, keywords, interactive)
        else:
            backend = _remote(url, merged, keywords, interactive)
        try:
            return _talk(backend, arguments, backend.limited, interactive)
        finally:
            backend.close()


def _talk(backend: Backend, arguments: argparse.Namespace, limited: bool, interactive: bool) -> int:
    from engine_chat.conversation import Conversation
    from engine_chat.loop import COMMANDS, Chat

    conversation = Conversation(getattr(arguments, "system", "").strip())
    if interactive:
        from engine_chat.line_reader import LineReader

        try:
            history = state_folder(os.environ) / HISTORY
        except RuntimeError:  # no home
            history = None
        print("Ask something; /help lists the commands.", flush=True)
        reader = LineReader(history, list(COMMANDS))
        Chat(backend, conversation, sys.stdout, sys.stdout, reader, limited=limited).interact()
        return 0
    chat = Chat(backend, conversation, sys.stdout, sys.stderr, None, limited=limited)
    if hasattr(arguments, "quick"):
        chat.ask(arguments.quick)
        return 2 if chat.failed else 0
    asked = False
    try:
        for line in sys.stdin:
            asked = asked or bool(line.strip())
            if not chat.take(line):
                break
    except UnicodeDecodeError as error:
        raise InvalidRequestError("read standard input", f"it is no UTF-8 text: {error}", "convert it") from error
    if not asked:
        raise InvalidRequestError(
            "chat through standard input", "it is empty", "write one question a line, or pass --quick"
        )
    return 2 if chat.failed else 0


def _embedded(merged: Merged, keywords: dict[str, Any], interactive: bool) -> Backend:
    _refuse_flags(merged, {"api_key"}, "it is for talking to a server", "name the server with --url")

    # Only now is anything heavy imported: mistakes in the command line are answered at once.
    from engine.embedding import EngineConfig
    from engine.types.params import SamplingParams

    config = EngineConfig.from_merged(merged)
    unlimited = {"max_tokens": None}
    SamplingParams(**(unlimited | keywords)).verify()
    from engine.embedding import LLMEngine
    from engine_chat.embedded import EmbeddedBackend

    engine = LLMEngine.from_engine_args(config)
    try:
        backend = EmbeddedBackend(engine, SamplingParams(**(unlimited | engine.sampling_defaults.params | keywords)))
    except BaseException:
        engine.shutdown()
        raise
    if interactive and engine.plan is not None:
        from engine.embedding import validated
        from engine_kit.banner import greeting, show

        verbose = validated(ChatSettings, merged).verbose
        show(greeting(engine.plan, engine.client.worker, None, verbose=verbose))
    return backend


def _remote(url: str, merged: Merged, keywords: dict[str, Any], interactive: bool) -> Backend:
    names = {key.name for key in merged.values} - _OF_THE_CLIENT
    _refuse_flags(merged, names, "that is the server's own affair when --url is given", "leave it out")
    from engine.embedding import validated
    from engine_chat.remote import RemoteBackend

    settings = merged.section("settings")
    if "seed" in settings:
        keywords["seed"] = int(settings["seed"])
    keys = validated(ChatSettings, merged).api_key or (None,)
    backend = RemoteBackend(url, settings.get("model"), keys[0], keywords)
    if interactive:
        print(f"{backend.model} at {backend.url}", flush=True)
    return backend


def _refuse_flags(merged: Merged, names: set[str], found: str, remedy: str) -> None:
    """Refuse flags that would do nothing. Files and the environment may hold settings of other programs."""
    for key, origin in merged.origins.items():
        if key.name in names and origin.startswith("flag "):
            raise ConfigError(f"engine chat with {origin.removeprefix('flag ')}", found, remedy)


def state_folder(environ: Mapping[str, str]) -> Path:
    """Where what outlives a program is kept (the XDG base directory for state). It is not created here.

    Raises RuntimeError where the user has no home.
    """
    given = environ.get("XDG_STATE_HOME", "")
    # The specification has relative paths ignored.
    base = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    return base / "engine"
