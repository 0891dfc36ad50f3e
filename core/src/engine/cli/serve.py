"""`engine serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys

from engine.cli.flags import add_engine_flags, add_server_flags, merged_settings
from engine.plugin.command import Command
from engine.types.errors import ConfigError


class Serve(Command):
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""

    help = "Serve a model over HTTP, as OpenAI's clients expect it."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model")
        add_server_flags(parser)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        positional = getattr(arguments, "served", None)
        if positional is not None:
            named = getattr(arguments, "engine.model", positional)
            if named != positional:
                raise ConfigError(f"serve {positional!r} with --model {named!r}", "these differ", "name one model")
            setattr(arguments, "engine.model", positional)
        merged = merged_settings(arguments)
        for warning in merged.warnings:
            print(f"warning: {warning}", file=sys.stderr)

        # Only now is anything heavy imported: mistakes in the command line are answered at once.
        from engine.config.server import ServerConfig
        from engine.config.settings import EngineConfig
        from engine.server.run import serve

        config, server = EngineConfig.from_merged(merged), ServerConfig.from_merged(merged)
        return serve(config, server.host, server.port, server.shutdown_timeout)
