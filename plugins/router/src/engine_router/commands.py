"""`engine route`."""

from __future__ import annotations

import argparse

from engine.embedding import OPTION
from engine.plugin.card import Command
from engine.plugin.points import ROUTER
from engine_kit.flags import add_plugin_flags, add_settings, command_settings
from engine_router.settings import RouterSettings


class Route(Command):
    """One front of several servers until SIGTERM or Ctrl-C."""

    help = "Stand in front of several servers: balance them, or let some compute the prompts for others."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_settings(parser, RouterSettings.declared)
        parser.add_argument(
            ROUTER.option_flag, metavar="DRIVER", dest=f"engine.{ROUTER.keyword}", help="which server takes a request"
        )
        parser.add_argument(OPTION, action="append", dest="engine.options", help=argparse.SUPPRESS)
        add_plugin_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        merged = command_settings(arguments)

        # Only now is anything heavy imported: mistakes in the command line are answered at once.
        from engine_router.run import route

        return route(merged)
