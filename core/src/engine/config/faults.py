"""Errors about settings: pydantic's in the engine's own words, and the place where a bad value was set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from engine.config.declaration import EngineSettings, command_settings
from engine.config.names import Key, resolve
from engine.plugin.options import plain
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import ConfigError, EngineError, OptionsError, PluginError

_NAMED = re.compile(r"(?:\A|\bwith )(?:--)?([a-z][\w.-]*)=|\A(?:set|open) (?:an option of )?([a-z][\w.-]*)")
"""What an error says was asked begins with what was set: "dtype=int4", "--attention=full=x", "set
drafter.depth to 3", "open model 'x'"."""


def config_error(error: ValidationError, origins: Mapping[Key, str]) -> ConfigError:
    """The first bad setting with where it was set, and what is wrong with all.

    Args:
        error: pydantic's.
        origins: where each setting was set.
    """
    faults = error.errors()
    keys = []
    texts = []
    for fault in faults:
        name, *rest = map(str, fault["loc"])
        keys.append(Key("points", rest[0]) if name == "points" and rest else Key("settings", name))
        cause = fault.get("ctx", {}).get("error")
        texts.append(cause.found if isinstance(cause, ConfigError) else fault["msg"])
    first = keys[0]
    origin = origins.get(first, "")
    declared = {**command_settings(), **EngineSettings.declared} if first.section == "settings" else {}
    setting = declared.get(first.name)
    shown = "a value" if setting is not None and setting.secret else repr(faults[0]["input"])
    return ConfigError(
        f"set {first} to {shown}" + (f" ({origin})" if origin else ""),
        texts[0] if len(texts) == 1 else "; ".join(f"{key}: {text}" for key, text in zip(keys, texts, strict=True)),
        f"{first} is: {setting.help}" if setting else "name an installed driver; `engine plugins` lists them",
    )


def add_place(error: EngineError, origins: Mapping[Key, str]) -> None:
    """Say in an error that followed from settings where those that it is about were set. What was typed as a flag, or
    written in Python, needs no such word.

    Args:
        error: about a setting, a driver, or options of one.
        origins: where each setting was set, see `engine.config.sources.Merged`.
    """
    places: dict[str, None] = {}
    for key in _about(error, origins):
        origin = origins[key]
        if origin.startswith("file "):
            places[f"{key} in {origin}"] = None
        elif origin.startswith("environment "):
            places[origin] = None
    if places:
        error.add_place(", ".join(places))


def _about(error: EngineError, origins: Mapping[Key, str]) -> Iterator[Key]:
    """The settings that an error is about, of those that were set."""
    keys: list[Key] = []
    for name in filter(None, (part for match in _NAMED.findall(error.asked) for part in match)):
        try:
            keys.append(resolve(name))
        except ConfigError:
            continue  # not the name of a setting
    if isinstance(error, PluginError) and not keys:
        point = error.point if error.point in POINTS else f"{HOOKS}.{plain(error.driver)}"
        options = error.options if isinstance(error, OptionsError) else ()
        keys += [Key("options", point, option) for option in options]
        if point not in POINTS and not keys:  # a hook plugin is asked for by its options alone
            keys += [key for key in origins if (key.section, key.name) == ("options", point)]
        if not any(key in origins for key in keys):
            keys.append(Key("points", point))
    return (key for key in keys if key in origins)
