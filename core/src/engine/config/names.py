"""What a name given by a user means: a setting of the engine or the server, a point, or an option of its driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from engine.config.declaration import SERVER_SETTINGS_BY_NAME, SETTINGS_BY_NAME
from engine.plugin.hints import did_you_mean
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import ConfigError

Path = tuple[str, ...]
"""Where a value stands in what a user gave, e.g. ("options", "attention", "num_splits")."""


class Key(NamedTuple):
    """One thing that can be set.

    Attributes:
        section: "settings" (the engine's), "server", "points" or "options".
        name: the setting's or the point's name; for options of a hook plugin "hooks.NAME", with underscores.
        option: the option's name, for options.
    """

    section: Literal["settings", "server", "points", "options"]
    name: str
    option: str = ""


def known_names() -> list[str]:
    """Every keyword: the settings, and the points by their flag."""
    return [*SETTINGS_BY_NAME, *SERVER_SETTINGS_BY_NAME, *(point.keyword for point in POINTS.values())]


def resolve(raw: str) -> Key:
    """What `raw` names; dashes and underscores are the same.

    `point.option` names an option, `hooks.plugin.option` one of a hook plugin, `server.host` is `host`. A point goes by
    its flag ("load_format") or, where no setting has that name, by its own ("checkpoint").

    Raises:
        ConfigError: nothing has this name; with near matches.
    """
    name, dot, option = raw.strip().replace("-", "_").partition(".")
    if dot and name == "server":
        return _server(option, raw)
    if dot and name == HOOKS:
        plugin, _, option = option.partition(".")
        return Key("options", _hooks(plugin, raw), _option(option, raw))
    if dot:
        return Key("options", _point(name, raw), _option(option, raw))
    if name in SETTINGS_BY_NAME:
        return Key("settings", name)
    if name in SERVER_SETTINGS_BY_NAME:
        return Key("server", name)
    return Key("points", _point(name, raw))


def fold(given: Mapping[str, Any], place: Callable[[Path], str] | None = None) -> dict[Key, Any]:
    """Sort what a user gave by what it means.

    `server`, `points`, `options` and `hooks` may be given as a whole, as mappings; `hooks` also below `options`.

    Args:
        given: names with their values.
        place: says in errors where a value stands; None says nothing.

    Raises:
        ConfigError: a name is unknown, is given twice in two spellings, or a whole is not a mapping.
    """
    return {key: value for key, (value, _) in fold_paths(given, place).items()}


def fold_paths(given: Mapping[str, Any], place: Callable[[Path], str] | None = None) -> dict[Key, tuple[Any, Path]]:
    """As `fold`; each value comes with its path."""
    folded: dict[Key, tuple[Any, Path]] = {}
    for path, value in _leaves(given, place):
        raw = ".".join(path)
        try:
            key = _resolve_path(path, raw)
            if key in folded:
                raise ConfigError(f"set {raw!r}", "it is set twice, in two spellings", "set it once")
        except ConfigError as error:
            raise _placed(error, path, place) from None
        folded[key] = value, path
    return folded


def _leaves(given: Mapping[str, Any], place: Callable[[Path], str] | None) -> Iterator[tuple[Path, Any]]:
    for raw, value in given.items():
        if raw not in ("server", "points", "options", HOOKS):
            yield (raw,), value
            continue
        for name, inner in _mapping((raw,), value, place).items():
            path = raw, str(name)
            if raw not in ("options", HOOKS):
                yield path, inner
                continue
            for option, setting in _mapping(path, inner, place).items():
                deeper = *path, str(option)
                if path == ("options", HOOKS):
                    yield from (((*deeper, str(o)), v) for o, v in _mapping(deeper, setting, place).items())
                else:
                    yield deeper, setting


def _resolve_path(path: Path, raw: str) -> Key:
    if len(path) == 1:
        return resolve(raw)
    name = path[1].replace("-", "_")
    if path[0] == "server":
        return _server(name, raw)
    if path[0] == "points":
        return Key("points", _point(name, raw))
    if path[0] == HOOKS:
        return Key("options", _hooks(name, raw), _option(path[2].replace("-", "_"), raw))
    if name == HOOKS:
        return Key("options", _hooks(path[2].replace("-", "_"), raw), _option(path[3].replace("-", "_"), raw))
    if name.startswith(f"{HOOKS}."):
        return Key("options", _hooks(name.partition(".")[2], raw), _option(path[2].replace("-", "_"), raw))
    return Key("options", _point(name, raw), _option(path[2].replace("-", "_"), raw))


def _server(name: str, raw: str) -> Key:
    if name in SERVER_SETTINGS_BY_NAME:
        return Key("server", name)
    raise ConfigError(
        f"set {raw!r}",
        "the server has no such setting",
        did_you_mean(name, SERVER_SETTINGS_BY_NAME) or f"its settings: {', '.join(SERVER_SETTINGS_BY_NAME)}",
    )


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


def _hooks(plugin: str, raw: str) -> str:
    if not plugin:
        raise ConfigError(f"set {raw!r}", "no hook plugin is named after the dot", f"write {HOOKS}.plugin.option")
    return f"{HOOKS}.{plugin}"


def _option(option: str, raw: str) -> str:
    if not option:
        raise ConfigError(f"set {raw!r}", "no option is named after the dot", "write point.option")
    return option


def _mapping(path: Path, value: Any, place: Callable[[Path], str] | None) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raw = ".".join(path)
        error = ConfigError(
            f"set {raw!r}", f"its value is {value!r}, not a mapping", "write names with their values below it"
        )
        raise _placed(error, path, place)
    return value


def _placed(error: ConfigError, path: Path, place: Callable[[Path], str] | None) -> ConfigError:
    return error if place is None else ConfigError(f"{error.asked} ({place(path)})", error.found, error.remedy)
