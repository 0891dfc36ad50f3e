"""What a name given by a user means: a setting of the engine or of a command, a point, or an option of its driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from engine.config.declaration import EngineSettings, command_settings, of_commands
from engine.plugin.hints import did_you_mean
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import ConfigError

Path = tuple[str, ...]
"""Where a value stands in what a user gave, e.g. ("options", "attention", "num_splits")."""
_BY_KEYWORD = {point.keyword: point.name for point in POINTS.values()}


class Key(NamedTuple):
    """One thing that can be set; as text it is what a config file has.

    Attributes:
        section: "settings" (the engine's and those of commands), "points" or "options".
        name: the setting's or the point's name; for options of a hook plugin "hooks.NAME", with underscores.
        option: the option's name, for options.
    """

    section: Literal["settings", "points", "options"]
    name: str
    option: str = ""

    @property
    def flag(self) -> str:
        """The flag that sets it, as typed: "--load-format", "--attention.num_splits"."""
        if self.section == "points":
            return POINTS[self.name].option_flag
        return "--" + ".".join(filter(None, (self.name.replace("_", "-"), self.option)))

    def __str__(self) -> str:
        if self.section == "points":
            return POINTS[self.name].keyword
        return ".".join(filter(None, (self.name, self.option)))


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
        return Key("settings", name)
    if not dot or name == "points":
        return Key("points", _point(rest or name, raw))
    if name in of_commands():
        if rest not in (declared := of_commands()[name].declared):
            hint = did_you_mean(rest, declared) or f"its settings: {', '.join(declared)}"
            raise ConfigError(f"set {raw!r}", f"the {name} has no such setting", hint)
        return Key("settings", rest)
    if name == "options":
        name, _, rest = rest.partition(".")
    if name == HOOKS:
        plugin, _, rest = rest.partition(".")
        if not plugin:
            raise ConfigError(f"set {raw!r}", "no hook plugin is named after the dot", f"write {HOOKS}.plugin.option")
        name = f"{HOOKS}.{plugin}"
    else:
        name = _point(name, raw)
    if not rest:
        raise ConfigError(f"set {raw!r}", "no option is named after the dot", "write point.option")
    return Key("options", name, rest)


def _point(name: str, raw: str) -> str:
    if name in _BY_KEYWORD or name in POINTS:
        return _BY_KEYWORD.get(name, name)
    known = known_names()
    raise ConfigError(
        f"set {raw!r}",
        "there is no such setting and no such point",
        did_you_mean(name, known) or f"what can be set: {', '.join(known)}",
    )


def fold(given: Mapping[str, Any], place: Callable[[Path], str] = lambda path: "") -> dict[Key, tuple[Any, str]]:
    """Sort what a user gave by what it means; each value comes with its place.

    `points`, `options`, `hooks` and what commands declare (`server`) may be given as a whole, as mappings; `hooks` also
    below `options`.

    Args:
        given: names with their values.
        place: says where a value stands.

    Raises:
        ConfigError: a name is unknown, is given twice in two spellings, or a whole is not a mapping.
    """
    folded: dict[Key, tuple[Any, str]] = {}
    for path, value in _leaves(given, ()):
        raw, where = ".".join(path), place(path)
        try:
            if _is_whole(path):
                found, remedy = f"its value is {value!r}, not a mapping", "write names with their values below it"
                raise ConfigError(f"set {raw!r}", found, remedy)
            key = resolve(raw)
            if key in folded:
                raise ConfigError(f"set {raw!r}", "it is set twice, in two spellings", "set it once")
        except ConfigError as error:
            asked = error.asked + (f" ({where})" if where else "")
            raise ConfigError(asked, error.found, error.remedy) from None
        folded[key] = value, where
    return folded


def _leaves(given: Mapping[str, Any], above: Path) -> Iterator[tuple[Path, Any]]:
    """Each value with its path. Mappings are looked into as deep as names go: what lies below is a value."""
    for name, value in given.items():
        path = (*above, str(name))
        if isinstance(value, Mapping) and _is_whole(path):
            yield from _leaves(value, path)
        else:
            yield path, value


def _is_whole(path: Path) -> bool:
    """Whether what stands there is names with their values."""
    depth = {"points": 1, HOOKS: 2, "options": 3 if path[1:2] == (HOOKS,) else 2}.get(path[0])
    if depth is None:
        depth = int(path[0] not in EngineSettings.declared and path[0] in of_commands())
    return len(path) <= depth
