"""The texts of this repository, taken apart: fenced blocks, code spans, links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CELL_END = re.compile(r"(?<!\\)\|")
_TABLE_HEAD_END = re.compile(r"\|( *:?-+:? *\|)+\Z")


class Block(NamedTuple):
    """A fenced block: where it stands, its language ("" for none), its text."""

    page: Path
    language: str
    text: str


def pages() -> list[Path]:
    """README, CONTRIBUTING, the core's README, and every page of docs/ that is written by hand."""
    written = [path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.relative_to(ROOT).parts]
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "core" / "README.md",
        ROOT / "sdk" / "kit" / "README.md",
        ROOT / "sdk" / "testing" / "README.md",
        *sorted(written),
    ]


def name(page: Path) -> str:
    """The page as people call it."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(page, match[2], match[3]) for match in _FENCE.finditer(text)]


def running_text(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """The code spans of a page, fenced blocks aside. A span may be broken over two lines."""
    return _SPAN.findall(re.sub(r"(?<=\S)\n(?=\S)", " ", running_text(page)))


def links(page: Path) -> list[str]:
    """The targets of a page's links."""
    return _LINK.findall(running_text(page))


def table_faults(text: str) -> list[str]:
    """What a reader would not see as the table that was meant, in a text without fenced blocks: rows without a
    head (a table that other text breaks in two), and rows of more or fewer cells than their head. A bar that is
    part of a cell is written with a backslash, in a code span too."""
    faults, table = [], list[str]()
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith("|"):
            table.append(line.strip())
            continue
        if table and (len(table) < 2 or not _TABLE_HEAD_END.match(table[1])):
            faults.append(f"no head above: {table[0]}")
        elif table:
            widths = [len(_CELL_END.findall(row)) for row in table]
            faults += [
                f"not as wide as its head: {row}" for row, n in zip(table, widths, strict=True) if n != widths[0]
            ]
        table = []
    return faults


def files(page: Path) -> dict[str, str]:
    """The blocks that are files: their first line is a comment with the file's name."""
    found = {}
    for block in blocks(page):
        match = re.match(r"# ([\w./-]+\.\w+)\n", block.text)
        if match:
            found[match[1]] = block.text
    return found
