"""`engine join`."""

from __future__ import annotations

import argparse

from engine.plugin import Command
from engine_kit.flags import add_settings, command_settings
from engine_nodes.settings import JoinSettings


class Join(Command):
    """Join a head, and start an engine's processes on this machine, until SIGTERM or Ctrl-C."""

    help = "Join an engine of several machines: start its cores and workers here."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "head", nargs="?", metavar="tcp://HEAD:PORT", help="where the head listens (--nodes.listen)"
        )
        add_settings(parser, JoinSettings.declared)

    def run(self, arguments: argparse.Namespace) -> int:
        merged = command_settings(arguments)

        from engine_nodes.agent import join

        return join(getattr(arguments, "head", ""), merged)
