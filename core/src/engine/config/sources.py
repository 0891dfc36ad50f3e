"""Where settings come from, and what the names that users give them by mean: a setting of the engine or of a command, a
point, or an option of its driver. Flags go before the config file, the file before the environment.

The result is plain strings and values with the place that each came from; nothing is validated but the names, and
pydantic is not imported. The environment is read here and nowhere else; a config file by a part that a package brings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from engine.config.declaration import EngineSettings, of_commands, settings_of_commands
from engine.plugin.hints import did_you_mean
from engine.plugin.loading import brought
from engine.plugin.plugin_list import PluginList
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import ConfigError

PREFIX = "ENGINE_"
CONFIG_VARIABLE = "ENGINE_CONFIG"

_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


# -- names -------------------------------------------------------------------------------------------------------------
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
    return [*EngineSettings.declared, *settings_of_commands(), *_BY_KEYWORD]


def resolve(raw: str) -> Key:
    """What `raw` names; dashes and underscores are the same.

    `point.option` names an option, `hooks.plugin.option` one of a hook plugin, `server.host` is `host`. A point goes by
    its flag ("load_format") or, where no setting has that name, by its own ("checkpoint").

    Raises ConfigError: nothing has this name; with near matches.
    """
    name, dot, rest = raw.strip().replace("-", "_").partition(".")
    if not dot and name in EngineSettings.declared:
        return Key("settings", name)
    if not dot and name not in _BY_KEYWORD and name not in POINTS and name in settings_of_commands():
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
    remedy = did_you_mean(name, known) or f"what can be set: {', '.join(known)}"
    raise ConfigError(f"set {raw!r}", "there is no such setting and no such point", remedy)


def fold(given: Mapping[str, Any], place: Callable[[Path], str] = lambda path: "") -> dict[Key, tuple[Any, str]]:
    """Sort what a user gave by what it means; each value comes with its place.

    `points`, `options`, `hooks` and what commands declare (`server`) may be given as a whole, as mappings; `hooks` also
    below `options`. `place` says where a value stands.

    Raises ConfigError: a name is unknown, is given twice in two spellings, or a whole is not a mapping.
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


# -- all sources -------------------------------------------------------------------------------------------------------
@dataclass
class Merged:
    """The merged settings, not yet validated.

    Attributes:
        values: what was set.
        origins: for each, where it was set: "flag --max-num-seqs", "file engine.yaml:3", "environment ENGINE_DTYPE".
        warnings: variables of the environment that look like a mistyped setting.
    """

    values: dict[Key, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def section(self, section: str) -> dict[str, Any]:
        """The settings by name, or the chosen drivers by point."""
        return {key.name: value for key, value in self.values.items() if key.section == section}

    def options(self) -> dict[str, dict[str, Any]]:
        """The drivers' options, by point, and those of hook plugins, by "hooks.NAME"."""
        options: dict[str, dict[str, Any]] = {}
        for key, value in self.values.items():
            if key.section == "options":
                options.setdefault(key.name, {})[key.option] = value
        return options

    def choice(self, point: str) -> tuple[str, str]:
        """The configured choice for a point and where it was made; ("auto", "") where nobody made one."""
        key = Key("points", point)
        return str(self.values.get(key, "auto")), self.origins.get(key, "")

    @property
    def plugin_list(self) -> PluginList:
        """Which of the installed plugins may be used."""
        key = Key("settings", "plugins")
        value = self.values.get(key) or ""
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return PluginList(text, self.origins.get(key, ""))

    def set(self, key: Key, value: Any, origin: str = "") -> None:
        """Set it, whatever it was before."""
        self.values[key] = value
        self.origins[key] = origin


def gather(
    flags: Mapping[str, Any] | None = None, config_file: str | None = None, environ: Mapping[str, str] | None = None
) -> Merged:
    """Merge the three sources.

    Args:
        flags: name to value, as the command line has them.
        config_file: path of a YAML file; None looks into ENGINE_CONFIG.
        environ: the environment; None is the process's own.

    Raises ConfigError: a name in the flags or the file is unknown, or the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    merged = Merged()
    _set_from_environment(merged, environ)
    if path := config_file or environ.get(CONFIG_VARIABLE):
        content, lines = brought("config_file", f"read the config file {path!r}")(path)
        # There is no line for what comes by an anchor, and for keys that YAML reads as no text.
        found = fold(content, lambda at: f"file {path}:{lines[at]}" if at in lines else f"file {path}")
        for key, (value, place) in found.items():
            merged.set(key, value, place)
    for key, (value, _) in fold(flags or {}).items():
        merged.set(key, value, f"flag {key.flag}")
    return merged


# -- the environment ---------------------------------------------------------------------------------------------------
def name_of(variable: str) -> str:
    """What a variable of the environment names, e.g. "attention.num_splits" for ENGINE_ATTENTION__NUM_SPLITS."""
    name = variable.removeprefix(PREFIX).lower()
    return name.replace("__", ".", 2 if name.startswith(f"{HOOKS}__") else 1)


def _set_from_environment(merged: Merged, environ: Mapping[str, str]) -> None:
    """ENGINE_MAX_NUM_SEQS is a setting, ENGINE_ATTENTION a point, ENGINE_ATTENTION__NUM_SPLITS an option, and
    ENGINE_HOOKS__RATE_LIMIT__MOST one of a hook plugin."""
    for variable in sorted(environ):
        text = environ[variable]
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or not text:
            continue
        name = name_of(variable)
        try:
            key = resolve(name)
        except ConfigError:
            # Other programs have variables with this prefix too: only what looks like a slip is worth a word.
            hint = did_you_mean(name.partition(".")[0], known_names())
            if hint:
                merged.warnings.append(f"environment variable {variable} sets nothing: {hint}")
            continue
        if _SERVICE_LINK.match(text):
            # Kubernetes puts ENGINE_PORT=tcp://10.0.0.7:8000 into every pod beside a service called "engine".
            found = f"{text!r} is a Kubernetes service link"
            merged.warnings.append(f"environment variable {variable} sets nothing: {found}")
            continue
        merged.set(key, text, f"environment {variable}")
