"""`engine plugins new`: what it writes installs, registers, keeps our own rules and passes its suite, as it is."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from registered import register

from engine.cli.main import main
from engine.plugin import POINTS
from engine_sdk.conformance import SUITES
from engine_sdk.conformance.report import run_driver, run_file
from engine_sdk.scaffold.write import HOOKS, kinds


def test_there_is_a_template_for_every_point_with_a_suite() -> None:
    assert set(kinds()) == {*SUITES, HOOKS}


def installed(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """(name, folder) of a fresh package, as `pip install -e` leaves it; its tests have names of their own."""
    name = f"fresh-{kind.replace('_', '-')}"
    assert main(["plugins", "new", kind, name, "--folder", str(folder)]) == 0
    package, site = folder / f"engine-{name}", folder / "site"
    for file in [*(package / "tests").glob("test_*.py")]:  # pytest keeps modules by name: this process runs several
        file.rename(file.with_stem(f"{file.stem}_{kind}"))
    register(package, site)
    path = [str(site), str(package / "src")]
    for entry in path:
        patch.syspath_prepend(entry)
    patch.setenv("PYTHONPATH", os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]))
    return name, package


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind not in (HOOKS, "communicator", "model")])
def test_its_body_is_as_the_interface_says(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all kinds, but for those whose suites start processes or import transformers; the rest takes longer."""
    _, folder = installed(kind, tmp_path, monkeypatch)
    (file,) = (folder / "tests").glob("test_*.py")
    report = run_file(file, select="body_has_the_interface or card_answers")
    assert len(report.of("passed")) >= 2 and not report.of("failed"), report.output[-3000:]


@pytest.mark.parametrize(
    "kind", [kind if kind == "router" else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds()]
)
def test_it_passes_its_suite_as_it_is(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One each time, all kinds with the slow tests."""
    name, folder = installed(kind, tmp_path, monkeypatch)
    assert f"engine-{name}" in capsys.readouterr().out
    for file in (folder / "tests").glob("test_*.py"):
        report = run_file(file)
        assert report.of("passed") and not report.of("failed"), report.output[-3000:]
    assert main(["plugins", "doctor", "--plugins", f"engine-{name},engine-sdk"]) == 0
    assert " all are sound" in capsys.readouterr().out
    if kind in POINTS:
        assert main(["plugins", "why", kind]) == 0
        assert name in capsys.readouterr().out
    made = {".hypothesis", "__pycache__"}
    written = [path for path in folder.rglob("*") if path.is_file() and not made & {*path.parts}]
    assert "my-driver" not in "".join(path.read_text() for path in written)


def test_a_models_package_is_named_after_its_architecture(tmp_path: Path) -> None:
    """The driver has config.json's string, and transformers' class of that name is what it is held against."""
    names = {
        "MiniMaxForCausalLM": ("mini-max", "MiniMax"),
        "GPTJForCausalLM": ("gptj", "GPTJ"),
        "GPTNeoXJapaneseForCausalLM": ("gpt-neo-x-japanese", "GPTNeoXJapanese"),
        "XLMRobertaXLModel": ("xlm-roberta-xl", "XLMRobertaXL"),
        "Llama4ForCausalLM": ("llama4", "Llama4"),
    }
    for architecture, (package, class_name) in names.items():
        assert main(["plugins", "new", "model", architecture, "--folder", str(tmp_path)]) == 0
        folder, module = tmp_path / f"engine-{package}", f"engine_{package.replace('-', '_')}"
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == f"engine-{package}"
        assert project["entry-points"]["engine.model.v0"] == {architecture: f"{module}.card:{class_name}Card"}
        assert f"class {class_name}Card(" in (folder / "src" / module / "card.py").read_text()
        test = (folder / "tests" / "test_conformance.py").read_text()
        assert f"class Test{class_name}(" in test and f'driver = "{architecture}"' in test and "oracle" not in test


def test_a_models_test_fails_clearly_until_it_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MiniMax that still is a Llama: its suite names the tensors that it has no place for."""
    assert main(["plugins", "new", "model", "MiniMaxForCausalLM", "--folder", str(tmp_path)]) == 0
    folder, site = tmp_path / "engine-mini-max", tmp_path / "site"
    (folder / "src" / "engine_mini_max").rename(folder / "src" / "engine_unfilled")
    for file in (folder / "pyproject.toml", *(folder / "src").rglob("*.py")):
        file.write_text(file.read_text().replace("engine_mini_max", "engine_unfilled"))
    register(folder, site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(folder / "src"))
    report = run_driver("model", "MiniMaxForCausalLM", {}, select="test_decode or test_describe_is_pure")
    assert [result.test for result in report.of("passed")] == ["test_describe_is_pure"]
    (failed,) = report.of("failed")
    assert "of its tensors 10 missing: model.layers.0.mlp.down_proj.weight" in failed.reason


@pytest.mark.parametrize("kind", kinds())
def test_it_names_no_registry(kind: str, tmp_path: Path) -> None:
    assert main(["plugins", "new", kind, "fresh", "--folder", str(tmp_path)]) == 0
    for path in (tmp_path / "engine-fresh").rglob("*.*"):
        assert "://" not in path.read_text(), f"{path.name} names a host"


@pytest.mark.parametrize("kind", kinds())
def test_it_depends_on_what_it_imports(kind: str, tmp_path: Path) -> None:
    """Pydantic comes with the core."""
    assert main(["plugins", "new", kind, "fresh", "--folder", str(tmp_path)]) == 0
    folder = tmp_path / "engine-fresh"
    imported: set[str] = set()
    for path in folder.glob("src/*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    declared = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"]
    there = {"engine", "engine_fresh", "pydantic", *(name.replace("-", "_") for name in declared)}
    assert "engine_base" in there and imported - there - sys.stdlib_module_names == set()


def test_all_keep_our_own_rules(tmp_path: Path) -> None:
    for kind in kinds():
        assert main(["plugins", "new", kind, "fresh", "--folder", str(tmp_path / kind)]) == 0
    settings = Path(__file__).parents[3] / "pyproject.toml"
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        ended = subprocess.run(
            [*ruff, *command, "--config", str(settings), "--config", 'src=["*/engine-fresh/src"]', "."],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["atention", "mine"], "did you mean 'attention'"),
        (["nothing-like-it", "mine"], "there is no such point"),
        *(([point, "mine"], "no template") for point in sorted(set(POINTS) - set(kinds()))[:1]),
        (["evictor", "Mine!"], "lower-case"),
        (["evictor", "MixtralForCausalLM"], "lower-case"),
        (["model", "mixtral_moe"], "or the architecture's string"),
        (["model", "LlamaForCausalLM"], "offers a driver of this name"),
        (["evictor", "lru"], "offers a driver of this name"),
        (["evictor", "mine"], "exists already"),
    ],
)
def test_slips(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "engine-mine").mkdir()
    assert main(["plugins", "new", *arguments, "--folder", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
