"""Where settings come from: flags go before the config file, the file before the environment.

The result is plain strings and values with the place that each came from; nothing is validated but the names, and
pydantic is not imported. The environment is read here and nowhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config.file import read_config_file
from engine.config.names import Key, Path, fold, fold_paths, known_names, resolve
from engine.plugin.hints import did_you_mean
from engine.plugin.plugin_list import PluginList
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import ConfigError

PREFIX = "ENGINE_"
CONFIG_VARIABLE = "ENGINE_CONFIG"

_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


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
        """The engine's settings, the server's, or the chosen drivers by point."""
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

    def _lay(self, values: Mapping[Key, Any], origins: Mapping[Key, str]) -> None:
        self.values.update(values)
        self.origins.update(origins)


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
    merged._lay(*_from_environment(environ, merged.warnings))
    path = config_file or environ.get(CONFIG_VARIABLE)
    if path:
        content, lines = read_config_file(path)

        def place(where: Path) -> str:
            line = lines.get(where)  # none for what comes by an anchor, and for keys that YAML reads as no text
            return f"file {path}" if line is None else f"file {path}:{line}"

        found = fold_paths(content, place)
        merged._lay({key: value for key, (value, _) in found.items()}, {k: place(at) for k, (_, at) in found.items()})
    values = fold(flags or {})
    merged._lay(values, {key: f"flag {flag_of(key)}" for key in values})
    return merged


def name_of(variable: str) -> str:
    """What a variable of the environment names, e.g. "attention.num_splits" for ENGINE_ATTENTION__NUM_SPLITS."""
    name = variable.removeprefix(PREFIX).lower()
    return name.replace("__", ".", 2 if name.startswith(f"{HOOKS}__") else 1)


def flag_of(key: Key) -> str:
    """The flag that sets this, as typed: "--load-format", "--attention.num_splits"."""
    if key.section in ("settings", "server"):
        return "--" + key.name.replace("_", "-")
    if key.section == "points":
        return POINTS[key.name].option_flag
    return f"--{key.name.replace('_', '-')}.{key.option}"


def _from_environment(environ: Mapping[str, str], warnings: list[str]) -> tuple[dict[Key, Any], dict[Key, str]]:
    """ENGINE_MAX_NUM_SEQS is a setting, ENGINE_ATTENTION a point, ENGINE_ATTENTION__NUM_SPLITS an option, and
    ENGINE_HOOKS__RATE_LIMIT__MOST one of a hook plugin."""
    values: dict[Key, Any] = {}
    origins: dict[Key, str] = {}
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
                warnings.append(f"environment variable {variable} sets nothing: {hint}")
            continue
        if _SERVICE_LINK.match(text):
            # Kubernetes puts ENGINE_PORT=tcp://10.0.0.7:8000 into every pod beside a service called "engine".
            warnings.append(f"environment variable {variable} sets nothing: {text!r} is a Kubernetes service link")
            continue
        values[key], origins[key] = text, f"environment {variable}"
    return values, origins
