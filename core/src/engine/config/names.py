"""What a name given by a user means: a setting of the engine or of a command, a point, or an option of its driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from engine.config.declaration import EngineSettings, Setting, command_settings, of_commands
from engine.plugin.hints import did_you_mean
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import ConfigError

Path = tuple[str, ...]
"""Where a value stands in what a user gave, e.g. ("options", "attention", "num_splits")."""
_BY_KEYWORD = {point.keyword: point.name for point in POINTS.values()}


class Key(NamedTuple):
    """One thing that can be set.

    Attributes:
        section: "settings" (the engine's), "server" (what commands declare, the server above all), "points" or
            "options".
        name: the setting's or the point's name; for options of a hook plugin "hooks.NAME", with underscores.
        option: the option's name, for options.
    """

    section: Literal["settings", "server", "points", "options"]
    name: str
    option: str = ""

    @property
    def setting(self) -> Setting | None:
        """What was declared; None for points and options."""
        if self.section == "settings":
            return EngineSettings.declared.get(self.name)
        return command_settings().get(self.name) if self.section == "server" else None


def known_names() -> list[str]:
    """Every keyword: the settings, and the points by their flag."""
    return [*EngineSettings.declared, *command_settings(), *_BY_KEYWORD]


def resolve(raw: str) -> Key:
    """What `raw` names; dashes and underscores are the same.

    `point.option` names an option, `hooks.plugin.option` one of a hook plugin, `server.host` is `host`. A point goes by
    its flag ("load_format") or, where no setting has that name, by its own ("checkpoint").

    Raises:
        ConfigError: nothing has this name; with near matches.
    """
    name, dot, rest = raw.strip().replace("-", "_").partition(".")
    if not dot and name in EngineSettings.declared:
        return Key("settings", name)
    if not dot and name not in _BY_KEYWORD and name not in POINTS and name in command_settings():
        return Key("server", name)
    if not dot or name == "points":
        return Key("points", _point(rest or name, raw))
    if name in of_commands():
        return _command_setting(name, rest, raw)
    if name == "options":
        name, _, rest = rest.partition(".")
    if name != HOOKS:
        return Key("options", _point(name, raw), _option(rest, raw))
    plugin, _, option = rest.partition(".")
    if not plugin:
        raise ConfigError(f"set {raw!r}", "no hook plugin is named after the dot", f"write {HOOKS}.plugin.option")
    return Key("options", f"{HOOKS}.{plugin}", _option(option, raw))


def fold(given: Mapping[str, Any], place: Callable[[Path], str] | None = None) -> dict[Key, Any]:
    """Sort what a user gave by what it means.

    `points`, `options`, `hooks` and what commands declare (`server`) may be given as a whole, as mappings; `hooks` also
    below `options`.

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
    for path, value in _leaves(given, (), place):
        raw = ".".join(path)
        try:
            key = resolve(raw)
            if key in folded:
                raise ConfigError(f"set {raw!r}", "it is set twice, in two spellings", "set it once")
        except ConfigError as error:
            raise _placed(error, path, place) from None
        folded[key] = value, path
    return folded


def _leaves(given: Any, above: Path, place: Callable[[Path], str] | None) -> Iterator[tuple[Path, Any]]:
    """Each value with its path. Mappings are looked into as deep as names go: what lies below is a value."""
    if not isinstance(given, Mapping):
        raw = ".".join(above)
        found, remedy = f"its value is {given!r}, not a mapping", "write names with their values below it"
        raise _placed(ConfigError(f"set {raw!r}", found, remedy), above, place)
    for name, value in given.items():
        path = *above, str(name)
        if (
            path in (("points",), ("options",), (HOOKS,))
            or (not above and name not in EngineSettings.declared and name in of_commands())
            or (len(path) == 2 and path[0] in ("options", HOOKS))
            or (len(path) == 3 and path[:2] == ("options", HOOKS))
        ):
            yield from _leaves(value, path, place)
        else:
            yield path, value


def _command_setting(command: str, name: str, raw: str) -> Key:
    declared = of_commands()[command].declared
    if name in declared:
        return Key("server", name)
    raise ConfigError(
        f"set {raw!r}",
        f"the {command} has no such setting",
        did_you_mean(name, declared) or f"its settings: {', '.join(declared)}",
    )


def _point(name: str, raw: str) -> str:
    if name in _BY_KEYWORD or name in POINTS:
        return _BY_KEYWORD.get(name, name)
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


def _placed(error: ConfigError, path: Path, place: Callable[[Path], str] | None) -> ConfigError:
    return error if place is None else ConfigError(f"{error.asked} ({place(path)})", error.found, error.remedy)
