"""The page about security names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_claim_has_its_test() -> None:
    rows = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        found = re.search(r"`([\w/]+\.py)::(\w+)` \|$", row)
        assert found is not None, f"no test is named: {row}"
        tree = ast.parse((ROOT / found[1]).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert found[2] in names, f"{found[1]} has no {found[2]}"
