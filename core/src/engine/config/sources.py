"""Where settings come from: flags go before the config file, the file before the environment.

The result is plain strings and values with the place that each came from; nothing is validated but the names, and
pydantic is not imported; yaml is, where there is a file. The environment is read here and nowhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config.names import Key, Path, fold, known_names, resolve
from engine.plugin.hints import did_you_mean
from engine.plugin.plugin_list import PluginList
from engine.plugin.points import HOOKS
from engine.types.errors import ConfigError

PREFIX = "ENGINE_"
CONFIG_VARIABLE = "ENGINE_CONFIG"

_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
_DEEPEST = 4
"""options, hooks, plugin, option: what lies deeper in a file is a value."""


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
    flags: Mapping[str, Any] | None = None,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Merged:
    """Merge the three sources.

    Args:
        flags: name to value, as the command line has them.
        config_file: path of a YAML file; None looks into ENGINE_CONFIG.
        environ: the environment; None is the process's own.

    Raises:
        ConfigError: a name in the flags or the file is unknown, or the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    merged = Merged()
    _set_from_environment(merged, environ)
    if path := config_file or environ.get(CONFIG_VARIABLE):
        content, lines = _read(path)
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


# -- the config file ---------------------------------------------------------------------------------------------------
def _read(path: str) -> tuple[Mapping[str, Any], dict[Path, int]]:
    """What a config file holds, and for the path of each key the line that it stands on, from 1.

    Raises ConfigError: it cannot be read, is not valid YAML, holds no mapping, or a key twice.
    """
    import yaml

    asked = f"read the config file {path!r}"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        content = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(asked, error.strerror or str(error), "check the path given with --config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(asked, f"it is not valid YAML: {' '.join(str(error).split())}", "mend the file") from error
    if content is None:
        return {}, {}
    if not isinstance(content, Mapping):
        raise ConfigError(asked, f"it holds a {type(content).__name__}", "write one 'setting: value' a line")
    lines: dict[Path, int] = {}
    _note_lines(root, (), lines, asked)
    return content, lines


def _note_lines(node: Any, above: Path, lines: dict[Path, int], asked: str) -> None:
    for key, value in node.value:
        path, line = (*above, str(key.value)), key.start_mark.line + 1
        if path in lines:
            found = f"{'.'.join(path)!r} stands on line {lines[path]} and on line {line}"
            raise ConfigError(asked, found, "set it once")
        lines[path] = line
        if len(path) < _DEEPEST and isinstance(value.value, list) and value.id == "mapping":
            _note_lines(value, path, lines, asked)
