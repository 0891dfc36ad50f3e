"""What `engine --help` says of each command (entry-point group `engine_parts`)."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

from engine.plugin import Candidate


def help_of(candidate: Candidate) -> str:
    """What a plugin's command says of itself, read from its source, for nothing is imported: its `help`, where its
    class sets it, before its methods, to a plain text, else the first line of its docstring; "" where neither can be
    read: its source is not there as a file, say."""
    module, _, name = candidate.value.partition(":")
    try:
        source = _source(module).read_text(encoding="utf-8")
        # As far as its first method: to parse whole files would take most of the time of `engine --help`.
        head = re.search(rf"^class {name.strip()}\b.*?(?=^ +(?:async )?def |^ +@|^[^\s)]|\Z)", source, re.M | re.S)
        found = ast.parse(head[0]).body[0] if head else None
    except Exception:  # whatever is wrong with it is said when it is called
        return ""
    if not isinstance(found, ast.ClassDef):
        return ""
    for node in found.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            text = node.value.value
            if isinstance(text, str) and any(isinstance(t, ast.Name) and t.id == "help" for t in targets):
                return " ".join(text.split())
    return (ast.get_docstring(found) or "").partition("\n")[0]


def _source(module: str) -> Path:
    """The file of a module. Only the specification of its top package is asked for, which imports nothing.

    Raises FileNotFoundError.
    """
    top, *inner = module.strip().split(".")
    spec = importlib.util.find_spec(top)
    places = [Path(folder, *inner) for folder in (spec and spec.submodule_search_locations) or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    if spec is not None and spec.origin and not inner:
        files = [Path(spec.origin)]
    if not (there := [file for file in files if file.is_file()]):
        raise FileNotFoundError(module)
    return there[0]
