"""docs/architecture.md: the stops of a request are where it says, and a newcomer's path is as short as it says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CORE = ROOT / "core" / "src" / "engine"
MOST_LINES = 5000
"""Of a newcomer's path."""


def find(path: str) -> Path:
    """The file that the page means."""
    places = (CORE, *ROOT.glob("plugins/*/src"), *ROOT.glob("sdk/*/src"))
    return next(place / path for place in places if (place / path).is_file())


@cache
def defined(path: str) -> frozenset[str]:
    """The functions and classes of a file, methods as "Class.method"."""
    found: set[str] = set()

    def look(node: ast.AST, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.update((child.name, f"{around}.{child.name}"))
                look(child, child.name)
            else:
                look(child, around)

    look(ast.parse(find(path).read_text(encoding="utf-8")), "")
    return frozenset(found)


def section(title: str) -> str:
    """What stands under a heading."""
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def stops() -> list[tuple[int, list[str], list[str]]]:
    """(number, functions, files) of each."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|", section("A request's way"), re.MULTILINE)
    return [(int(number), *(re.findall(r"`([^`]+)`", cell) for cell in cells)) for number, *cells in rows]


def path_of_a_newcomer() -> list[tuple[str, int]]:
    """(file, lines as told) of each."""
    rows = re.findall(r"^\| `([\w/.]+)` \| (\d+) \|", section("A newcomer's path"), re.MULTILINE)
    return [(path, int(lines)) for path, lines in rows]


def test_the_stops_are_counted():
    numbers = [number for number, _, _ in stops()]
    files = {path for _, _, paths in stops() for path in paths}
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 30
    assert f"There are {len(numbers)} stops in {len(files)} files" in TEXT


@pytest.mark.parametrize(("number", "names", "paths"), stops())
def test_each_stop_is_there(number, names, paths):
    """Each name is in one of the files that stand beside it, and each file has one of the names."""
    assert {name for name in names if not any(name in defined(path) for path in paths)} == set()
    assert {path for path in paths if not defined(path).intersection(names)} == set()


def test_requests_and_outputs_are_where_it_says():
    rows = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \| [^|]+ \|$", section("A request's way"), re.MULTILINE)
    assert len(rows) == 8 + 6 and "eight classes are a request, and six are an output" in TEXT
    assert [name for name, path in rows if name not in defined(path)] == []


def test_a_newcomers_path_is_short():
    told = path_of_a_newcomer()
    assert len(told) > 15
    lines = {path: len(find(path).read_text(encoding="utf-8").splitlines()) for path, _ in told}
    assert sum(lines.values()) <= MOST_LINES
    assert {path: lines[path] for path, number in told if abs(number - lines[path]) > 50} == {}, "write these anew"
