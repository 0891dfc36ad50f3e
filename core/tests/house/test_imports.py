"""What may be imported where, held at run time: import-linter sees direct imports only."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

from engine import embedding
from engine.plugin import Registry
from engine.plugin.points import POINTS

OURS = ("engine", "engine_bench", "engine_chat", "engine_inspect", "engine_server")

TORCH_FREE = (
    *(
        f"engine.{room}"
        for room in ("types", "process", "plugin", "config", "interfaces", "kv", "scheduling", "loop", "frontend")
    ),
    *("engine.cli", "engine_bench", "engine_chat", "engine_inspect", "engine_server"),
)
"""Packages in which nothing imports torch, directly or through others, whatever module is taken."""

TORCH_FREE_MODULES = ("engine", "engine.llm", "engine.__main__")

LIGHT_CARD = {"pydantic", "pydantic_core", "msgspec", "numpy"} | {
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
}
"""The third-party packages that a card may bring with it, and what these bring."""

LIGHT = ("engine_cpu", "engine_parallel", "engine_parsers", "engine_reference", "engine_tiny")
"""Our packages whose cards are looked at."""


IMPORT = """
import importlib, json, os, sys, traceback
failed = 0
for batch in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        try:
            for name in batch:
                importlib.import_module(name)
                top = {m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)
                print(json.dumps([name, sorted(top)]), flush=True)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed |= os.waitpid(child, 0)[1]
sys.exit(bool(failed))
"""


def import_all(*batches: list[str]) -> dict[str, list[str]]:
    """Import the modules of each batch in turn, each batch in a fork of a process that has imported nothing; for each
    module, the third-party top-level modules loaded by then."""
    command = [sys.executable, "-c", IMPORT, json.dumps(batches)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(line) for line in result.stdout.splitlines())


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*OURS, cache_dir=None, exclude_type_checking_imports=True)


def modules_of(graph: grimp.ImportGraph, package: str) -> list[str]:
    found = [package, *graph.find_descendants(package)]
    return sorted(name for name in found if not name.endswith("__main__"))


def test_every_module_of_a_torch_free_package_leaves_torch_alone(graph):
    packages = [modules_of(graph, package) for package in TORCH_FREE]
    assert all(len(modules) > 1 for modules in packages)
    # One after the other in one process: whoever is the first to have it loaded is named.
    for module, loaded in import_all([module for modules in packages for module in modules]).items():
        assert "torch" not in loaded, f"{module} has torch imported"
        assert "transformers" not in loaded, f"{module} has transformers imported"


def test_the_package_itself_and_llm_leave_torch_alone():
    loaded = import_all(*([module] for module in TORCH_FREE_MODULES))
    for module in TORCH_FREE_MODULES:
        assert "torch" not in loaded[module], module
    assert third_party(loaded["engine"]) == set()


def test_the_embedding_module_is_light_and_has_what_it_names():
    assert third_party(import_all(["engine.embedding"])["engine.embedding"]) == set()
    for name in embedding.__all__:
        assert getattr(embedding, name) is not None
    typed = ast.parse(Path(embedding.__file__).read_text())
    checked = next(node for node in typed.body if isinstance(node, ast.If))  # what type checkers see
    seen = {f"{node.module}.{alias.name}" for node in checked.body for alias in node.names}
    assert seen == {f"engine.{module}.{name}" for module, names in embedding.NAMES.items() for name in names}


def third_party(loaded: list[str]) -> set[str]:
    """Without ourselves, and without the finders that editable installs put into every process."""
    return {name for name in loaded if name != "engine" and not name.startswith(("__", "_"))}


def test_the_plugin_host_is_light():
    loaded = set(import_all(["engine.plugin"])["engine.plugin"])
    assert not loaded & {"numpy", "torch", "pydantic", "stevedore", "msgspec", "pluggy"}


def builtin_cards() -> list[str]:
    registry = Registry.discover()
    found = (c.value.partition(":")[0] for point in POINTS for c in registry.candidates(point))
    return sorted({module for module in found if module.startswith(LIGHT)})


def test_cards_are_light():
    """DESIGN section 5: under 20 ms beyond pydantic, msgspec and numpy; held by what they import, not by a clock."""
    modules = builtin_cards()
    assert len(modules) > 15
    for module, loaded in import_all(modules).items():  # the first that brings something is named
        extra = third_party(loaded) - LIGHT_CARD - {*LIGHT, "engine_kit"}
        assert not extra, f"the card {module} imports {sorted(extra)}"


def test_no_import_cycle(graph):
    assert cycles(graph) == []


def cycles(graph: grimp.ImportGraph) -> list[set[str]]:
    """Strongly connected components of more than one module (Tarjan 1972, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[set[str]] = []
    for root in sorted(graph.modules):
        if root in index:
            continue
        work = [(root, iter(sorted(graph.find_modules_directly_imported_by(root))))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            module, imports = work[-1]
            for target in imports:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(graph.find_modules_directly_imported_by(target)))))
                    break
                if target in on_stack:
                    low[module] = min(low[module], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[module])
                if low[module] == index[module]:
                    component: set[str] = set()
                    while module not in component:
                        component.add(stack.pop())
                    on_stack -= component
                    if len(component) > 1:
                        found.append(component)
    return found


def test_the_cycle_finder_finds_cycles():
    graph = grimp.ImportGraph()
    for module in "abcde":
        graph.add_module(module)
    for importer, imported in ("ab", "bc", "ca", "cd", "de"):
        graph.add_import(importer=importer, imported=imported)
    assert cycles(graph) == [{"a", "b", "c"}]


def test_no_files_name_each_other() -> None:
    """The same with imports for types alone, and of every package. A package's own file, which gathers the names below
    it, says nothing."""
    with open(Path(__file__).parents[3] / "pyproject.toml", "rb") as file:
        packages = tomllib.load(file)["tool"]["importlinter"]["root_packages"]
    graph = grimp.build_graph(*packages, cache_dir=None)
    for package in [module for module in graph.modules if graph.find_children(module)]:
        for module in list(graph.find_modules_directly_imported_by(package)):
            graph.remove_import(importer=package, imported=module)
    assert cycles(graph) == []
