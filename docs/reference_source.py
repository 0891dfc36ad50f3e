"""From Python source to Markdown: signatures and docstrings as they stand, read without importing anything.

Used by `generate_reference.py`. Reading the source keeps annotations as they were written, and needs neither torch
nor a device.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

_SECTION = re.compile(r"([A-Z][\w ]*(?: \([^)]*\))?):\Z")
_LABEL = re.compile(r"(Order|Process|Thread|Cost|Raises|Returns): (.+)")
_ITEM = re.compile(r"(\*{0,2}[\w][\w, ]*): (.*)")
_CODE_SPAN = re.compile(r"(`+[^`]*`+)")
_LONGEST_CONSTANT = 160


def escape(text: str) -> str:
    """Plain text as Markdown that shows it as it is; code spans are left alone."""
    parts = _CODE_SPAN.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*_\[\]|])", r"\\\1", parts[i]).replace("<", "&lt;")
    return "".join(parts)


def cell(text: str) -> str:
    """One cell of a table: no line breaks, no bars."""
    return escape(" ".join(text.split()))


def code(text: str) -> str:
    """A code span for a table's cell."""
    return "`" + text.replace("|", "\\|") + "`" if text else ""


def arguments(docstring: str | None) -> dict[str, str]:
    """The entries of a docstring's `Args:` or `Attributes:`, by name ("a, b: ..." counts for both)."""
    found: dict[str, str] = {}
    section, names = "", []
    for line in inspect.cleandoc(docstring or "").splitlines():
        if line and not line.startswith(" "):
            match = _SECTION.match(line)
            section, names = (match[1] if match else ""), []
        elif section in ("Args", "Arguments", "Attributes") and line.strip():
            item = _ITEM.match(line[4:])
            if item:
                names = [name.strip(" *") for name in item[1].split(",")]
                found |= dict.fromkeys(names, item[2])
            else:
                for name in names:
                    found[name] += " " + line.strip()
    return found


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: sections become lists, indented examples become code."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    out: list[str] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        section, label = _SECTION.match(line), _LABEL.match(line)
        if section and i + 1 < len(lines) and lines[i + 1].startswith("    "):
            block, i = _block(lines, i + 1)
            out += ["", f"**{section[1]}**", "", *_items(block), ""]
        elif label:
            block, i = _block(lines, i + 1)
            out += ["", f"**{label[1]}**: " + escape(" ".join([label[2], *(part.strip() for part in block)])), ""]
        elif line.startswith("    ") and (not out or not out[-1]):
            block, i = _block(lines, i)
            out += ["```", *block, "```", ""]
        elif line.startswith("- "):
            out += ["", *_bullets(lines, i)] if not out or not out[-1].startswith("- ") else _bullets(lines, i)
            i += 1
        else:
            out.append(escape(line))
            i += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _block(lines: list[str], start: int) -> tuple[list[str], int]:
    """The indented lines from `start` on, without their indent, and the first line after them."""
    end = start
    while end < len(lines) and (lines[end].startswith("    ") or not lines[end]):
        end += 1
    return "\n".join(line[4:] for line in lines[start:end]).strip("\n").splitlines(), end


def _bullets(lines: list[str], i: int) -> list[str]:
    return ["- " + escape(lines[i][2:])]


def _items(block: list[str]) -> Iterator[str]:
    """The entries of a section as a list; a section that holds plain text stays a paragraph."""
    entries: list[str] = []
    for line in block:
        if line.startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        elif _ITEM.match(line) or not entries:
            entries.append(line)
        else:
            entries[-1] += " " + line.strip()
    for entry in entries:
        item = _ITEM.match(entry)
        yield f"- `{item[1]}`: {escape(item[2])}" if item else escape(entry)


# -- modules -------------------------------------------------------------------------------------------------------
def source_of(module: str) -> Path:
    """The file of a module, which is not imported (its packages are)."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no module {module}"
    return Path(spec.origin)


def tree_of(module: str) -> ast.Module:
    """The module's syntax tree."""
    return ast.parse(source_of(module).read_text(encoding="utf-8"))


def render_module(module: str) -> str:
    """A page for one module: its docstring, constants, classes and functions that are public and its own."""
    tree = tree_of(module)
    out = [f"# {module}", "", prose(ast.get_docstring(tree)), ""]
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            out += _class(node)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            out += [f"## {node.name}", "", "```python", *_signature(node), "```", ""]
            out += [prose(ast.get_docstring(node)), ""]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            out += _constant(node, following)
    return "\n".join(out).rstrip() + "\n"


def class_docstrings(module: str) -> dict[str, str]:
    """The docstrings of a module's classes, by name."""
    return {n.name: ast.get_docstring(n) or "" for n in tree_of(module).body if isinstance(n, ast.ClassDef)}


def _constant(node: ast.Assign | ast.AnnAssign, following: ast.stmt | None) -> list[str]:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if not isinstance(target, ast.Name) or target.id.startswith("_") or (text := _string(following)) is None:
        return []
    source = ast.unparse(node)
    shown = source if len(source) <= _LONGEST_CONSTANT else source.partition("=")[0] + "= ..."
    return [f"## {target.id}", "", "```python", shown, "```", "", prose(text), ""]


def _class(node: ast.ClassDef) -> list[str]:
    out = [f"## {node.name}", "", "```python", *(f"@{ast.unparse(decorator)}" for decorator in node.decorator_list)]
    bases = [ast.unparse(base) for base in (*node.bases, *node.keywords)]
    out.append(f"class {node.name}" + (f"({', '.join(bases)})" if bases else "") + ":")
    fields = [n for n in node.body if isinstance(n, (ast.AnnAssign, ast.Assign)) and not _private(n)]
    out += ["    " + ast.unparse(field) for field in fields] or ["    ..."]
    out += ["```", "", prose(ast.get_docstring(node)), ""]
    for field, following in zip(node.body, [*node.body[1:], None], strict=True):
        if field in fields and (text := _string(following)) is not None:
            out += [f"- `{_name(field)}`: {escape(' '.join(text.split()))}"]
    out.append("")
    for method in node.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and _shown(method):
            out += [f"### {node.name}.{method.name}", "", "```python"]
            out += [f"@{ast.unparse(decorator)}" for decorator in method.decorator_list]
            out += [*_signature(method), "```", "", prose(ast.get_docstring(method)), ""]
    return out


def _shown(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return not method.name.startswith("_") or (method.name.startswith("__") and bool(ast.get_docstring(method)))


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    line = f"{prefix} {node.name}({ast.unparse(node.args)}){returns}"
    if len(line) <= 110:
        return [line]
    parts: list[str] = []
    depth, start, text = 0, 0, ast.unparse(node.args)
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [f"{prefix} {node.name}(", *(f"    {part}," for part in parts), f"){returns}"]


def _string(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return None


def _name(node: ast.AnnAssign | ast.Assign) -> str:
    return ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])


def _private(node: ast.AnnAssign | ast.Assign) -> bool:
    return _name(node).startswith("_")
