"""`engine config`: every setting with its value and where it came from."""

from __future__ import annotations

import argparse
import json
from typing import Any

from engine.cli.flags import (
    add_engine_flags,
    add_positional_model,
    add_server_flags,
    command_settings,
    name_positional_model,
)
from engine.plugin.card import Command
from engine.types.errors import EngineError


class Config(Command):
    """Print what an engine and a server would be started with. Drivers are chosen, nothing is loaded."""

    help = "Print every setting, the driver of every point and its options, and where each was set."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_positional_model(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_server_flags(parser)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        name_positional_model(arguments, "show the settings for")
        merged = command_settings(arguments)

        from engine.cli.config_tree import as_json, as_yaml, resolve
        from engine.config.server import ServerConfig
        from engine.config.settings import EngineConfig
        from engine.frontend.launch import Launch, launch

        config, server = EngineConfig.from_merged(merged), ServerConfig.from_merged(merged)
        plan: Launch | None = None
        stopped: EngineError | None = None
        try:
            plan = launch(config)
        except EngineError as error:
            # Whoever looks for the reason why an engine does not start wants to see its settings all the more.
            stopped = error
        tree = resolve(merged, config, server, plan)
        print(
            json.dumps(as_json(tree), indent=2, default=_plain) if getattr(arguments, "json", False) else as_yaml(tree)
        )
        if stopped is not None:
            raise stopped
        return 0


def _plain(value: Any) -> Any:
    return str(value)
