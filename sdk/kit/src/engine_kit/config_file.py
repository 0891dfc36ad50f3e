"""A config file of settings: YAML, with the lines on which its keys stand (entry-point group `engine_parts`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.types.errors import ConfigError

Path = tuple[str, ...]
"""Of a key, from the outermost, e.g. ("options", "attention", "num_splits")."""
_DEEPEST = 4
"""options, hooks, plugin, option: what lies deeper in a file is a value."""


def read(path: str) -> tuple[Mapping[str, Any], dict[Path, int]]:
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
