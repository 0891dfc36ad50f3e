"""The engine's flags, made from the declared settings and points, for commands that start one or ask about one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from engine.embedding import OPTION, EngineSettings, Merged, Setting, gather
from engine.plugin.points import PICKS, POINTS, Point
from engine.types.errors import ConfigError

_PREFIX = "engine."
_METAVARS = {"text": "TEXT", "integer": "N", "number": "X", "bytes": "SIZE", "boolean": None}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for `--config`, each setting and each point."""
    settings = parser.add_argument_group("engine settings", "also in a config file, or as ENGINE_<NAME>")
    settings.add_argument("--config", metavar="FILE", dest=_PREFIX + "config", help="a YAML file with settings")
    for setting in EngineSettings.declared.values():
        _add_setting(settings, setting)
    drivers = parser.add_argument_group(
        "drivers", "name a driver for a point (`engine plugins` lists them); options of a driver: --POINT.OPTION VALUE"
    )
    for point in POINTS.values():
        drivers.add_argument(point.option_flag, metavar=_metavar(point), dest=_PREFIX + point.keyword, help=point.help)
    drivers.add_argument(OPTION, action="append", dest=_PREFIX + "options", help=argparse.SUPPRESS)


def add_plugin_flags(parser: argparse.ArgumentParser) -> None:
    """Add what says which plugins may be used, for commands that start no engine."""
    parser.add_argument("--config", metavar="FILE", dest=_PREFIX + "config", help="a YAML file with settings")
    _add_setting(parser, EngineSettings.declared["plugins"])


def add_settings(parser: argparse.ArgumentParser | argparse._ArgumentGroup, declared: Mapping[str, Setting]) -> None:
    """Add a flag for each setting that a command declares, or for some of them."""
    for setting in declared.values():
        _add_setting(parser, setting)


def add_positional_model(parser: argparse.ArgumentParser) -> None:
    """Let the model be named without a flag."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")


def name_positional_model(arguments: argparse.Namespace, doing: str) -> None:
    """Take a model that was named without a flag for --model. Raises ConfigError where both are there and differ."""
    positional = getattr(arguments, "positional_model", None)
    if positional is None:
        return
    named = getattr(arguments, _PREFIX + "model", positional)
    if named != positional:
        raise ConfigError(f"{doing} {positional!r} and --model {named!r}", "these differ", "name one model")
    setattr(arguments, _PREFIX + "model", positional)


def command_settings(namespace: argparse.Namespace) -> Merged:
    """`merged_settings`, for the command that the process was started for: from here on it logs as they say. It is said
    what became of flags by other names, and what is odd about the settings."""
    merged = merged_settings(namespace)
    if merged.section("settings").get("log_format") == "json":
        from engine_kit.logs import log_as

        log_as("json")
    for note in getattr(namespace, "notes", ()):
        _say("note", note)
    for warning in merged.warnings:
        _say("warning", warning)
    return merged


def merged_settings(namespace: argparse.Namespace) -> Merged:
    """The flags of a parsed command line, merged with the config file and the environment.

    Raises ConfigError: as `engine.embedding.gather`.
    """
    given: dict[str, Any] = {
        name.removeprefix(_PREFIX): value for name, value in vars(namespace).items() if name.startswith(_PREFIX)
    }
    config_file = given.pop("config", None)
    for text in given.pop("options", []):
        name, _, value = text.partition("=")
        given[name] = _structured(value)
    return gather(given, config_file)


def _say(kind: str, text: str) -> None:
    from engine_kit.logs import tell

    tell("engine.config", text, f"{kind}: {text}")


def _add_setting(group: argparse.ArgumentParser | argparse._ArgumentGroup, setting: Setting) -> None:
    shown = setting.default
    if setting.type == "bytes" and isinstance(shown, int):
        shown = f"{shown // 2**20}MiB"
    default = "" if shown is None else f" (default: {shown})"
    dest = _PREFIX + setting.name
    if setting.type == "boolean":
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, dest=dest, help=setting.help + default)
        return
    metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else _METAVARS[setting.type]
    action = "append" if setting.repeatable else "store"
    group.add_argument(setting.flag, action=action, metavar=metavar, dest=dest, help=setting.help + default)


def _metavar(point: Point[Any, Any]) -> str:
    if point.pick == "per_kind":
        return "DRIVER|KIND=DRIVER,..."
    return "DRIVER,..." if PICKS[point.pick].several else "DRIVER"


def _structured(value: str) -> Any:
    """Lists and mappings may be written as JSON; everything else stays text for the driver's `Options` to read."""
    if value[:1] not in ("[", "{"):
        return value
    import json

    try:
        return json.loads(value)
    except ValueError:
        return value
