"""What the documentation says of hooks and interfaces is what the code says: names, arguments, defaults, kinds."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from engine.plugin import POINTS
from engine.plugin.hookspecs import HOOKSPECS, facts_of
from engine_sdk.conformance import SUITES
from tests.docs.markdown import ROOT, blocks, name, pages

sys.path.insert(0, str(ROOT / "docs"))

import generate_reference

INTERFACES = generate_reference.interface_modules()
METHOD = re.compile(r"^### (\w+)\.(\w+)\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
HOOK = re.compile(r"^### (\w+)\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
Arguments = list[tuple[str, str, str]]
"""Each with its annotation and its default, as text; "" for none."""


def hooks() -> dict[str, tuple[str, Any]]:
    """Every hook: its process and its specification."""
    return {
        hook: (process, function)
        for process, spec in HOOKSPECS.items()
        for hook, function in vars(spec).items()
        if not hook.startswith("_")
    }


def of_code(function: Any) -> Arguments:
    """What Python itself says of a function, without `self` and `cls`."""
    found = []
    for parameter in inspect.signature(inspect.unwrap(getattr(function, "__func__", function))).parameters.values():
        kind = "" if parameter.annotation is parameter.empty else same(str(parameter.annotation))
        default = "" if parameter.default is parameter.empty else same(repr(parameter.default))
        found.append((parameter.name, kind, default))
    return [argument for argument in found if argument[0] not in ("self", "cls")]


def of_text(text: str) -> Arguments:
    """The same of a signature as it is written."""
    (function,) = ast.parse("\n".join([*text.strip().splitlines()]) + ": ...").body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    return of_tree(function)


def of_tree(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Arguments:
    """The same of a function in a syntax tree."""
    given = function.args
    first = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(first) - len(given.defaults)) + list(given.defaults)
    several = list(zip(first, defaults, strict=True))
    several += [] if given.vararg is None else [(given.vararg, None)]
    several += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    several += [] if given.kwarg is None else [(given.kwarg, None)]
    found = [
        (a.arg, same(ast.unparse(a.annotation)) if a.annotation else "", same(ast.unparse(d)) if d else "")
        for a, d in several
    ]
    return [argument for argument in found if argument[0] not in ("self", "cls")]


def same(expression: str) -> str:
    """One spelling of an expression."""
    try:
        return ast.unparse(ast.parse(expression, mode="eval")).strip("'\"")
    except SyntaxError:
        return expression  # the repr of an object


def public_methods(module: Any) -> Iterator[tuple[type, str]]:
    """Of the classes that a module defines."""
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__ and not kind.__name__.startswith("_"):
            for method, value in vars(kind).items():
                if inspect.isfunction(getattr(value, "__func__", value)) and not method.startswith("_"):
                    yield kind, method


@pytest.mark.parametrize("module", INTERFACES)
def test_the_reference_has_every_method_with_its_arguments(module: str) -> None:
    page = generate_reference.render_module(module)
    found = {(match[1], match[2]): match[3] for match in METHOD.finditer(page)}
    code = importlib.import_module(module)
    for kind, method in public_methods(code):
        text = found[kind.__name__, method]
        signature = "\n".join(line for line in text.splitlines() if not line.startswith("@"))
        wanted = of_code(vars(kind)[method])
        given = of_text(signature)
        assert [a[:2] for a in given] == [a[:2] for a in wanted], f"{kind.__name__}.{method}"
        assert [bool(a[2]) for a in given] == [bool(a[2]) for a in wanted], f"{kind.__name__}.{method}: defaults"


def test_the_reference_has_every_hook_with_its_arguments() -> None:
    found = {match[1]: match[2] for match in HOOK.finditer(generate_reference.hooks_page())}
    assert found.keys() == hooks().keys()
    for hook, (_, function) in hooks().items():
        assert of_text(found[hook]) == of_code(function), hook


def test_the_guide_names_every_hook_with_its_process_and_kind() -> None:
    text = (ROOT / "docs" / "plugins" / "hooks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \| (\w+) \| (\w+) \|", text, re.MULTILINE)
    said = {hook: (process, kind) for names, process, kind in rows for hook in re.findall(r"`(\w+)`", names)}
    words = {"observing": "observes"}
    assert said == {
        hook: (process, words.get(facts_of(function).kind, "decides")) for hook, (process, function) in hooks().items()
    }


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class in the guides' examples."""
    for page in pages():
        for block in blocks(page):
            if block.language == "python":
                for node in ast.walk(ast.parse(block.text)):
                    if isinstance(node, ast.ClassDef):
                        yield name(page), node


def functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """A class's own."""
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_hooks_in_the_guides_take_what_they_are_given() -> None:
    """An implementation may leave arguments out, and may not have others."""
    seen = set()
    for page, node in classes():
        for function in functions(node).values():
            if any("hookimpl" in ast.unparse(decorator) for decorator in function.decorator_list):
                assert function.name in hooks(), f"{page}: there is no hook {function.name}"
                wanted = [argument for argument, _, _ in of_code(hooks()[function.name][1])]
                given = [argument for argument, _, _ in of_tree(function)]
                assert set(given) <= set(wanted), f"{page}: {function.name}({', '.join(given)})"
                seen.add(function.name)
    assert len(seen) >= 6, "the guides' examples of hooks are not found"


def protocols() -> dict[str, type]:
    """The bodies' interfaces, by name."""
    found: dict[str, type] = {}
    for module in map(importlib.import_module, INTERFACES):
        found |= {
            kind.__name__: kind
            for kind in vars(module).values()
            if isinstance(kind, type) and kind.__module__ == module.__name__ and getattr(kind, "_is_protocol", False)
        }
    return found


def test_bodies_in_the_guides_take_the_interfaces_arguments() -> None:
    """A class that has all methods of an interface is taken for a body of it."""
    seen = set()
    for page, node in classes():
        own = functions(node)
        for protocol, kind in protocols().items():
            methods = {m for m, value in vars(kind).items() if inspect.isfunction(value) and not m.startswith("_")}
            if methods and methods <= own.keys():
                for method in methods:
                    wanted = [argument for argument, _, _ in of_code(getattr(kind, method))]
                    given = [argument for argument, _, _ in of_tree(own[method])]
                    assert given == wanted, f"{page}: {node.name}.{method} is not {protocol}'s"
                seen.add(protocol)
    assert {"SchedulingPolicy", "LogitsProcessor"} <= seen, "the guides' examples of bodies are not found"


@pytest.mark.parametrize("point", POINTS)
def test_the_guide_names_what_cards_have(point: str) -> None:
    """Code spans in the column of cards: attributes of the point's card; with arguments, its methods and theirs."""
    text = (ROOT / "docs" / "plugins" / "interfaces.md").read_text(encoding="utf-8")
    (column,) = re.findall(rf"^\| \[{point}\]\([^|]+\| ([^|]+) \|", text, re.MULTILINE)
    module, _, card = POINTS[point].interface.partition(":")
    interface = getattr(importlib.import_module(module), card)
    for span in re.findall(r"`([^`]+)`", column):
        attribute, brackets, arguments = span.partition("(")
        assert hasattr(interface, attribute) or attribute in interface.__annotations__, f"{card} has no {attribute}"
        if brackets:
            wanted = [argument for argument, _, _ in of_code(getattr(interface, attribute))]
            assert [a.strip() for a in arguments.rstrip(")").split(",") if a.strip()] == wanted, span
    own = {method for kind, method in public_methods(sys.modules[module]) if kind is interface}
    own -= {"mismatches", "unsupported", "remarks"}  # every card's
    unnamed = {method for method in own if f"`{method}" not in column}
    assert not unnamed, f"methods of {card} that the guide does not name"


@pytest.mark.parametrize("page", ["docs/plugins/prove.md", "sdk/testing/README.md"])
def test_the_tables_of_suites(page: str) -> None:
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == {point: suite for point, (suite, *_) in SUITES.items()}
