"""`engine plugins new`: what it writes installs, registers, keeps our own rules and passes its suite, as it is."""

from __future__ import annotations

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
from engine_sdk.conformance.report import run_driver
from engine_sdk.scaffold.write import HOOKS, kinds


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
    path = [str(site), str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
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


def test_a_models_package_is_named_after_its_architecture(tmp_path: Path) -> None:
    """The driver has config.json's string, and transformers' class of that name is what it is held against."""
    names = {
        "MixtralForCausalLM": ("mixtral", "Mixtral"),
        "GPT2LMHeadModel": ("gpt2", "GPT2"),
        "GPTNeoXForCausalLM": ("gpt-neo-x", "GPTNeoX"),
        "XLMRobertaXLModel": ("xlm-roberta-xl", "XLMRobertaXL"),
        "Qwen2MoeForCausalLM": ("qwen2-moe", "Qwen2Moe"),
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
    """A Mixtral that still is a Llama: its suite names the tensors that it has no place for."""
    assert main(["plugins", "new", "model", "MixtralForCausalLM", "--folder", str(tmp_path)]) == 0
    folder, site = tmp_path / "engine-mixtral", tmp_path / "site"
    # The package of the same name that a stranger wrote lies on the path of these tests.
    (folder / "src" / "engine_mixtral").rename(folder / "src" / "engine_unfilled")
    for file in (folder / "pyproject.toml", *(folder / "src").rglob("*.py")):
        file.write_text(file.read_text().replace("engine_mixtral", "engine_unfilled"))
    register(folder, site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(folder / "src"))
    report = run_driver("model", "MixtralForCausalLM", {}, select="test_decode or test_describe_is_pure")
    assert [result.test for result in report.of("passed")] == ["test_describe_is_pure"]
    (failed,) = report.of("failed")
    assert "of its tensors 6 missing: model.layers.0.mlp.down_proj.weight" in failed.reason


@pytest.mark.parametrize("kind", kinds())
def test_it_names_no_registry(kind: str, tmp_path: Path) -> None:
    assert main(["plugins", "new", kind, "fresh", "--folder", str(tmp_path)]) == 0
    for path in (tmp_path / "engine-fresh").rglob("*.*"):
        assert "://" not in path.read_text(), f"{path.name} names a host"


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
