"""What a name given by a user means: a setting, a point, or an option of a point's driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from engine.config.declaration import SETTINGS_BY_NAME
from engine.plugin.near import did_you_mean
from engine.plugin.points import POINTS
from engine.types.errors import ConfigError


class Key(NamedTuple):
    """One thing that can be set.

    Attributes:
        section: "settings", "points" or "options".
        name: the setting's or the point's name.
        option: the option's name, for options.
    """

    section: Literal["settings", "points", "options"]
    name: str
    option: str = ""


def known_names() -> list[str]:
    """Every keyword: the settings, and the points by their flag."""
    return [*SETTINGS_BY_NAME, *(point.keyword for point in POINTS.values())]


def resolve(raw: str) -> Key:
    """What `raw` names; dashes and underscores are the same. `point.option` names an option.

    A point goes by its flag ("load_format") or, where no setting has that name, by its own ("checkpoint").

    Raises:
        ConfigError: nothing has this name; with near matches.
    """
    name, dot, option = raw.strip().replace("-", "_").partition(".")
    if dot:
        return Key("options", _point(name, raw), _option(option, raw))
    if name in SETTINGS_BY_NAME:
        return Key("settings", name)
    return Key("points", _point(name, raw))


def fold(given: Mapping[str, Any]) -> dict[Key, Any]:
    """Sort what a user gave by what it means. `points` and `options` may be given as a whole, as mappings.

    Raises:
        ConfigError: a name is unknown, is given twice in two spellings, or a whole is not a mapping.
    """
    folded: dict[Key, Any] = {}

    def put(key: Key, value: Any, raw: str) -> None:
        if key in folded:
            raise ConfigError(f"set {raw!r}", "it is set twice, in two spellings", "set it once")
        folded[key] = value

    for raw, value in given.items():
        if raw == "points":
            for name, driver in _mapping(raw, value).items():
                put(Key("points", _point(str(name).replace("-", "_"), f"points.{name}")), driver, f"points.{name}")
        elif raw == "options":
            for name, options in _mapping(raw, value).items():
                point = _point(str(name).replace("-", "_"), f"options.{name}")
                for option, setting in _mapping(f"options.{name}", options).items():
                    path = f"options.{name}.{option}"
                    put(Key("options", point, _option(str(option).replace("-", "_"), path)), setting, path)
        else:
            put(resolve(raw), value, raw)
    return folded


def _point(name: str, raw: str) -> str:
    for point in POINTS.values():
        if name == point.keyword:
            return point.name
    if name in POINTS:
        return name
    known = known_names()
    raise ConfigError(
        f"set {raw!r}",
        "there is no such setting and no such point",
        did_you_mean(name, known) or f"what can be set: {', '.join(known)}",
    )


def _option(option: str, raw: str) -> str:
    if not option:
        raise ConfigError(f"set {raw!r}", "no option is named after the dot", "write point.option")
    return option


def _mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"set {name!r}", f"its value is {value!r}, not a mapping", "write names with their values")
    return value
