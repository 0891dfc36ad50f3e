"""Where the settings that an error is about were set: a word for those who did not type them (entry-point group
`engine_parts`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from engine.embedding import Key
from engine.plugin.options import plain
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import ConfigError, EngineError, OptionsError, PluginError

_NAMED = re.compile(r"(?:\A|\bwith )(?:--)?([a-z][\w.-]*)=|\A(?:set|open) (?:an option of )?([a-z][\w.-]*)")
"""What an error says was asked begins with what was set: "dtype=int4", "--attention=full=x", "set
drafter.depth to 3", "open model 'x'"."""


def setting_places(error: EngineError, origins: Mapping[Key, str], resolve: Callable[[str], Key]) -> str:
    """Where what an error is about was set, e.g. "dtype in file engine.yaml:3"; "" for what was typed as a flag, or
    written in Python, which needs no such word.

    Args:
        error: about a setting, a driver, or options of one.
        origins: where each setting was set, see `engine.embedding.Merged`.
        resolve: the setting of a name. Raises ConfigError where there is none.
    """
    places: dict[str, None] = {}
    for key in _about(error, origins, resolve):
        origin = origins[key]
        if origin.startswith("file "):
            places[f"{key} in {origin}"] = None
        elif origin.startswith("environment "):
            places[origin] = None
    return ", ".join(places)


def _about(error: EngineError, origins: Mapping[Key, str], resolve: Callable[[str], Key]) -> Iterator[Key]:
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
