"""The generated reference holds everything, and the whole documentation builds without a broken link."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.declaration import EngineSettings
from engine.interfaces.ops import OPERATIONS, Ops
from engine.plugin import POINTS, Registry
from engine.plugin.hints import known_drivers
from engine.plugin.hookspecs import HOOKSPECS
from engine.types.errors import EngineError
from engine_server.settings import ServerSettings
from tests.docs.markdown import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the documentation with its reference, as `make docs` has it."""
    made = tmp_path_factory.mktemp("documentation")
    shutil.copytree(ROOT / "docs", made / "docs", ignore=shutil.ignore_patterns("reference", "__pycache__"))
    shutil.copy(ROOT / "zensical.toml", made)
    out = made / "docs" / "reference"
    subprocess.run([sys.executable, ROOT / "docs" / "generate_reference.py", "--out", out], check=True)
    return made


def page(folder: Path, name: str) -> str:
    return (folder / "docs" / "reference" / name).read_text(encoding="utf-8")


def headings(text: str) -> set[str]:
    return set(re.findall(r"^#+ (.*)$", text, re.MULTILINE))


def below(kind: type[EngineError]) -> set[str]:
    return {kind.__name__}.union(*(below(inner) for inner in kind.__subclasses__()))


def test_every_point_with_its_interface_and_our_drivers(folder):
    text = page(folder, "points.md")
    assert set(POINTS) <= headings(text)
    for point in POINTS.values():
        module, _, card = point.interface.partition(":")
        assert point.option_flag in text and point.group(point.majors[0]) in text
        assert card in headings(page(folder, f"modules/{module}.md"))
    drivers = headings(page(folder, "drivers.md"))
    ours = [
        c
        for c in Registry.discover().found
        if c.distribution in ("engine-reference", "engine-tiny") and c.point in POINTS
    ]
    assert len(ours) > 10
    assert {f"{c.point} {c.name}" for c in ours} <= drivers


def test_every_hook(folder):
    text = page(folder, "hooks.md")
    names = {name for spec in HOOKSPECS.values() for name in vars(spec) if not name.startswith("_")}
    assert len(names) >= 3
    assert names <= headings(text)


def test_every_setting(folder):
    text = page(folder, "settings.md")
    for setting in (EngineSettings.declared | ServerSettings.declared).values():
        assert f"| `{setting.name}` | `{setting.flag}` |" in text


def test_every_error_class(folder):
    text = page(folder, "errors.md")
    from engine.types import errors

    kinds = {kind for kind in below(EngineError) if hasattr(errors, kind)}
    assert len(kinds) > 15
    assert kinds <= headings(text)


def test_every_command_with_its_flags(folder):
    text = page(folder, "commands.md")
    for command in known_drivers()["commands"]:
        assert f"engine {command}" in headings(text)
    assert text.count("--scheduling-policy") >= 2


def test_signatures_and_docstrings_come_from_the_code(folder):
    text = page(folder, "modules/engine.interfaces.ops.md")
    assert {f"Ops.{operation}" for operation in OPERATIONS} <= headings(text)
    assert f"def linear({'self'}" in text
    first = (Ops.linear.__doc__ or "").strip().splitlines()[0]
    assert first[:30].replace("[", r"\[").replace("]", r"\]") in text


def test_the_documentation_builds_without_a_broken_link(folder):
    built = build(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    for name in ("index.html", "users/server.html", "reference/points.html"):
        assert (folder / "site" / name).is_file(), name


def test_a_broken_link_fails_the_build(tmp_path):
    """Of one page: with the rest it takes as long as the whole documentation."""
    settings = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    (tmp_path / "zensical.toml").write_text(re.sub(r"^nav = \[.*?^\]$", "", settings, flags=re.MULTILINE | re.DOTALL))
    (tmp_path / "docs").mkdir()
    for text, fails in (("[here](index.md)", False), ("[nowhere](nowhere.md)", True)):
        (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{text}\n")
        built = build(tmp_path)
        assert bool(built.returncode) == fails, built.stdout + built.stderr


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    zensical = Path(sys.executable).with_name("zensical")
    return subprocess.run(
        [zensical, "build", "--strict", "--clean", "-f", folder / "zensical.toml"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )
