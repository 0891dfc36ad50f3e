"""`engine serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse

from engine.embedding import (
    add_engine_flags,
    add_positional_model,
    add_settings,
    command_settings,
    name_positional_model,
)
from engine.plugin.card import Command
from engine_server.settings import ServerSettings


class Serve(Command):
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""

    help = "Serve a model over HTTP, as OpenAI's clients expect it."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_positional_model(parser)
        add_settings(parser.add_argument_group("server"), ServerSettings.declared)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        name_positional_model(arguments, "serve")
        merged = command_settings(arguments)

        # Only now is anything heavy imported: mistakes in the command line are answered at once.
        from engine.embedding import EngineConfig
        from engine_server.config import ServerConfig
        from engine_server.run import serve

        config, server = EngineConfig.from_merged(merged), ServerConfig.from_merged(merged)
        return serve(config, server)
