"""`engine plugins new`: what it writes installs, registers, keeps our own rules and passes its suite, as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.plugin import POINTS
from engine_sdk.conformance import SUITES
from engine_sdk.scaffold.write import HOOKS, kinds


def register(folder: Path, site: Path) -> None:
    """What an editable installation leaves behind, without its seconds: metadata, and the sources on the path."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"]
    text = "\n".join(f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in groups[group].items()) for group in groups)
    (info / "entry_points.txt").write_text(text + "\n")


def test_there_is_a_template_for_every_point_with_a_suite() -> None:
    assert set(kinds()) == {*SUITES, HOOKS}


SOME = ("attention",)
"""Kinds that are tried each time; the others take longer, and are tried with the slow tests."""


@pytest.mark.parametrize(
    "kind", [kind if kind in SOME else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds()]
)
def test_it_passes_its_suite_as_it_is(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"fresh-{kind.replace('_', '-')}"
    assert main(["plugins", "new", kind, name, "--folder", str(tmp_path)]) == 0
    assert f"engine-{name}" in capsys.readouterr().out
    folder, site = tmp_path / f"engine-{name}", tmp_path / "site"
    register(folder, site)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(folder / "src")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder / "tests")]
    ended = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-2000:]
    doctor = subprocess.run(
        [sys.executable, "-m", "engine", "plugins", "doctor"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert doctor.returncode == 0, doctor.stdout
    if kind in POINTS:
        why = [sys.executable, "-m", "engine", "plugins", "why", kind]
        said = subprocess.run(why, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
        assert name in said
    made = {".hypothesis", "__pycache__"}
    written = [path for path in folder.rglob("*") if path.is_file() and not made & {*path.parts}]
    assert "my-driver" not in "".join(path.read_text() for path in written)


@pytest.mark.parametrize("kind", kinds())
def test_it_keeps_our_own_rules(kind: str, tmp_path: Path) -> None:
    assert main(["plugins", "new", kind, "fresh", "--folder", str(tmp_path)]) == 0
    settings = Path(__file__).parents[3] / "pyproject.toml"
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        ended = subprocess.run(
            [*ruff, *command, "--config", str(settings), "--config", 'src=["src"]', "src", "tests"],
            cwd=tmp_path / "engine-fresh", capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["atention", "mine"], "did you mean 'attention'"),
        (["nothing-like-it", "mine"], "there is no such point"),
        *(([point, "mine"], "no template") for point in sorted(set(POINTS) - set(kinds()))[:1]),
        (["evictor", "Mine!"], "lower-case"),
        (["evictor", "lru"], "offers a driver of this name"),
        (["evictor", "mine"], "exists already"),
    ],
)
def test_slips(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "engine-mine").mkdir()
    assert main(["plugins", "new", *arguments, "--folder", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
