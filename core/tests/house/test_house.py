"""The house's own rules that no linter knows."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from engine.plugin import Card, Registry
from engine.plugin.points import HOOK_PROCESSES, POINTS

ROOT = Path(__file__).resolve().parents[3]
PYPROJECTS = [
    ROOT / "core/pyproject.toml",
    *ROOT.glob("plugins/*/pyproject.toml"),
    *ROOT.glob("contrib/*/pyproject.toml"),
    *ROOT.glob("sdk/*/pyproject.toml"),
]


def sources() -> list[Path]:
    """Every Python file of the workspace's packages, tests included."""
    folders = [
        ROOT / "core",
        *sorted((ROOT / "plugins").iterdir()),
        *sorted((ROOT / "contrib").iterdir()),
        ROOT / "sdk",
        ROOT / "tests",
    ]
    files = [path for folder in folders if folder.is_dir() for path in folder.rglob("*.py")]
    return sorted(p for p in files if not {"build", ".venv", "__pycache__"} & set(p.relative_to(ROOT).parts))


@pytest.fixture(scope="module")
def size() -> ModuleType:
    """What `make size` runs."""
    spec = importlib.util.spec_from_file_location("size", ROOT / ".ci/size.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["size"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_core_is_in_its_rooms_and_the_readme_has_their_table(size):
    """Its rooms, their budgets, and, nearly, their sizes: `make size` has not to be run for each commit."""
    core = ROOT / "core/src/engine"
    assert {path.name for path in core.iterdir() if (path / "__init__.py").exists()} == set(size.ROOMS)
    made = size.markdown().splitlines()
    written = size.README.read_text().partition(size.BEGIN)[2].partition(size.END)[0].splitlines()
    without_counts = [[row.split("|")[column] for column in (1, 2, 4)] for row in made]
    assert [[row.split("|")[column] for column in (1, 2, 4)] for row in written] == without_counts, "run `make size`"
    for old, new in zip(written[2:], made[2:], strict=True):
        told, found = ([int(count) for count in re.findall(r"\d+", row.replace(",", ""))] for row in (old, new))
        assert np.allclose(told, found, rtol=0.03, atol=20), f"run `make size`: {new}"


def test_one_attribute_a_line():
    """`self.a = a`, then `self.b = b`; in the core, nothing is unpacked into attributes either."""
    offenders = []
    for path in sources():
        in_core = path.is_relative_to(ROOT / "core/src")
        for node in ast.walk(ast.parse(path.read_text())):
            targets = [t for t in node.targets if isinstance(t, ast.Tuple)] if isinstance(node, ast.Assign) else []
            several = any(sum(isinstance(part, ast.Attribute) for part in target.elts) > 1 for target in targets)
            if several and (in_core or isinstance(node.value, ast.Tuple)):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offenders == []


@pytest.mark.parametrize("package", [path.parent for path in PYPROJECTS], ids=lambda path: path.name)
def test_a_class_name_means_one_thing_in_a_package(package):
    found = {}
    for path in sorted((package / "src").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_lines_of_code_are_counted(size, tmp_path):
    text = '"""A."""\n\nimport os\nfrom a import (\n    b,\n)\n\nx = 1  # one\n"""Of x."""\n# why\ny = """t\nu"""\n'
    (tmp_path / "a.py").write_text(text)
    assert size.size([tmp_path / "a.py"]) == (12, 3, 1)


def test_the_environment_is_read_in_config_alone():
    offenders = []
    for path in (ROOT / "core" / "src").rglob("*.py"):
        if "config" in path.relative_to(ROOT / "core" / "src" / "engine").parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
            if attribute and isinstance(node.value, ast.Name) and node.value.id == "os":
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offenders == []


def test_what_blames_a_driver_says_of_which_point():
    """`engine.plugin.manifest.Blame` then names the driver and its distribution."""
    found = []
    for path in (ROOT / "core" / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ContractError":
                found.append((f"{path.name}:{node.lineno}", ast.unparse(node)))
    assert len(found) > 10
    assert [where for where, call in found if "point=" not in call and "blame" not in call] == []


def test_nothing_that_is_read_can_run():
    """What comes from a file, a socket or a user is data: no module that serves unpickles or evaluates anything."""
    modules, names = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}, {"eval", "exec"}
    # Tools of who trains the bundled model, and of the kit's ranks in a test, on files of their own.
    own = {
        "plugins/tiny/src/engine_tiny/train.py",
        "plugins/tiny/src/engine_tiny/export.py",
        "sdk/testing/src/engine_sdk/conformance/communicator/ranks.py",
    }
    offenders = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        if "/src/" not in name or name in own:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            found: set[str] = set()
            if isinstance(node, ast.Import):
                found = {alias.name.split(".")[0] for alias in node.names} & modules
            elif isinstance(node, ast.ImportFrom):
                found = {(node.module or "").split(".")[0]} & modules
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found = {node.func.id} & names
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "load" in node.func.attr:
                called = ast.unparse(node.func)
                found = {called} & {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load"}
                if "weights_only=True" in ast.unparse(node):  # builds tensors and nothing else
                    found -= {"torch.load"}
            offenders += [f"{name}:{node.lineno}: {what}" for what in found]
    assert offenders == []


def test_every_package_is_typed_and_has_the_same_form():
    for pyproject in PYPROJECTS:
        folder = pyproject.parent
        for part in ("README.md", "src", "tests", "LICENSE"):
            assert (folder / part).exists(), f"{folder.name} has no {part}"
        assert list((folder / "src").glob("*/py.typed")), f"{folder.name} has no py.typed"
        native = (folder / "CMakeLists.txt").exists()
        backend = "scikit_build_core.build" if native else "setuptools.build_meta"
        assert tomllib.loads(pyproject.read_text())["build-system"]["build-backend"] == backend


@pytest.mark.parametrize("point", POINTS.values(), ids=lambda point: point.name)
def test_every_points_interface_resolves_to_a_card(point):
    module, _, attribute = point.interface.partition(":")
    interface = getattr(importlib.import_module(module), attribute)
    assert issubclass(interface, Card) and interface is not Card
    assert point.help and "\n" not in point.help
    assert (point.pick == "per_kind") == bool(point.kinds)


def test_points_and_flags_are_unique_and_are_no_settings():
    from engine.config.declaration import EngineSettings

    flags = [point.option_flag for point in POINTS.values()] + [
        setting.flag for setting in EngineSettings.declared.values()
    ]
    assert len(set(flags)) == len(flags)


def ours() -> list[object]:
    registry = Registry.discover()
    points = [*POINTS, *(f"hooks.{process}" for process in HOOK_PROCESSES), "commands"]
    return [c for point in points for c in registry.candidates(point) if c.distribution.startswith("engine")]


@pytest.mark.parametrize("candidate", ours(), ids=lambda c: f"{c.point}-{c.name}")
def test_every_entry_point_of_ours_resolves(candidate):
    registry = Registry.discover()
    assert registry.find(candidate.point, candidate.name, candidate.distribution) == candidate
    if candidate.point not in POINTS:
        return
    card = registry.card(candidate)
    assert card.__doc__, f"{candidate.value} has no docstring"
    assert card.body or card.bodies, f"{candidate.value} names no body"


@pytest.mark.parametrize("candidate", ours(), ids=lambda c: f"{c.point}-{c.name}")
def test_every_body_of_ours_resolves(candidate):
    from engine.plugin import load_body

    if candidate.point not in POINTS:
        pytest.skip("hooks and commands have no body")
    card = Registry.discover().card(candidate)
    if card.framework is not None:
        pytest.importorskip(card.framework, reason=f"{card.framework} is not installed")
    if candidate.distribution == "engine-ray":
        pytest.importorskip("ray", reason="ray is not installed")
    for half in [*card.bodies] or [None]:
        assert isinstance(load_body(card, half, candidate=candidate), type)


def test_metadata_and_pyproject_agree():
    """An entry point that was added to a pyproject but not installed would be missing without a word."""
    registry = Registry.discover()
    for pyproject in PYPROJECTS:
        project = tomllib.loads(pyproject.read_text())["project"]
        declared = {
            (group, name, value)
            for group, entries in project.get("entry-points", {}).items()
            for name, value in entries.items()
        }
        installed = {(c.group, c.name, c.value) for c in registry.found if c.distribution == project["name"]}
        entries = importlib.metadata.distribution(project["name"]).entry_points
        installed |= {(entry.group, entry.name, entry.value) for entry in entries if entry.group.startswith("engine_")}
        assert installed == declared, f"run `make install`: {project['name']}"


def test_the_core_knows_no_drivers_name():
    """No driver's name is compared with anything in the core. A driver may bear the name of the kind of layer that it
    serves ("mla"): the kind is the core's word."""
    names = {c.name for c in Registry.discover().found if c.point in POINTS and c.point != "model"}
    names -= {kind for point in POINTS.values() for kind in point.kinds}
    offenders = []
    for path in (ROOT / "core" / "src" / "engine").rglob("*.py"):
        if "builtin" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                for side in (node.left, *node.comparators):
                    parts = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]
                    offenders += [
                        f"{path.relative_to(ROOT)}:{node.lineno} {part.value!r}"
                        for part in parts
                        if isinstance(part, ast.Constant) and part.value in names
                    ]
    assert offenders == []
