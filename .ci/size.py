"""How big the core is, room by room: physical lines, lines of code, files.

`--check` fails over the total; `--write` puts the table into the README, too.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "src" / "engine"

ROOMS: dict[str, tuple[str, int]] = {
    "types": ("what travels: params, requests, plans, outputs, errors", 2300),
    "process": ("one child process, the wire's codec, addresses", 800),
    "plugin": ("points, cards, discovery, selection, manifest, hooks", 2500),
    "config": ("settings", 650),
    "interfaces": ("one file a point: need, card, body", 3200),
    "distributed": ("places, groups, collectives", 350),
    "kv": ("pages and reuse", 2100),
    "sampling": ("logits to tokens", 500),
    "modeling": ("layers, weights", 2200),
    "scheduling": ("which requests compute how many tokens", 3100),
    "runner": ("a plan's tensors, the forward pass, the worker", 2900),
    "loop": ("EngineCore: the step loop and its process", 900),
    "frontend": ("text in, text out; clients; the launcher; llm.py", 4300),
    "cli": ("main", 400),
}
"""What each room is for, and the physical lines that it shall come to."""

MOST = 27_000
"""Physical lines that the core may have. It only ever goes down."""
README = ROOT / "README.md"
BEGIN, END = "<!-- make size -->\n", "<!-- end of make size -->\n"

_SKIPPED = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENCODING}
_SKIPPED |= {tokenize.ENDMARKER}


class Size(NamedTuple):
    """Of some files: physical lines, lines of code (no docstring, comment, import, blank line), and their number."""

    lines: int
    code: int
    files: int


def size(paths: list[Path]) -> Size:
    """Count these files."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return Size(sum(len(text.splitlines()) for text in texts), sum(map(_code, texts)), len(texts))


def _code(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        string = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if string or isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def table() -> tuple[list[tuple[str, str, int, Size]], Size]:
    """A row a room (name, what it is for, lines at most, size), and the whole core."""
    found: dict[str, list[Path]] = {room: [] for room in ROOMS}
    for path in sorted(CORE.rglob("*.py")):
        room = path.relative_to(CORE).parts[0]
        found[room if room in ROOMS else "frontend"].append(path)
    rows = [(room, text, most, size(found[room])) for room, (text, most) in ROOMS.items()]
    return rows, size([path for paths in found.values() for path in paths])


def markdown() -> str:
    """The table as the README has it."""
    rows, total = table()
    lines = ["| room | what | lines | at most | code | files |", "|---|---|---|---|---|---|"]
    for room, text, most, found in rows:
        name = f"`{room}/`" if room != "frontend" else "`frontend/`, `llm.py`"
        lines.append(f"| {name} | {text} | {found.lines:,} | {most:,} | {found.code:,} | {found.files} |")
    aim = f"{MOST:,}"
    lines.append(f"| **core** | | **{total.lines:,}** | {aim} | {total.code:,} | {total.files} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    rows, total = table()
    print(f"{'room':<12} {'lines':>7} {'at most':>8} {'code':>7} {'files':>6}  what")
    for room, text, most, found in rows:
        print(f"{room:<12} {found.lines:>7,} {most:>8,} {found.code:>7,} {found.files:>6}  {text}")
    print(f"{'core':<12} {total.lines:>7,} {MOST:>8,} {total.code:>7,} {total.files:>6}")
    if "--write" in sys.argv:
        before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
        README.write_text(before + BEGIN + markdown() + END + rest.partition(END)[2], encoding="utf-8")
    if "--check" in sys.argv and total.lines > MOST:
        print(f"the core has {total.lines:,} lines, at most {MOST:,} are allowed: what can leave it, or go?")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
