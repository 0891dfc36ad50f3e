"""What a plugin's command says of itself, read from its source: for the list of commands nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.plugin.candidate import Candidate


def help_of(candidate: Candidate) -> str:
    """The command's `help`, where its class sets it to a plain text, else the first line of its docstring; "" where
    neither can be read: its source is not there as a file, say."""
    module, _, name = candidate.value.partition(":")
    try:
        tree = ast.parse(_source(module).read_bytes())
        found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name.strip())
    except Exception:  # whatever is wrong with it is said when it is called
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
