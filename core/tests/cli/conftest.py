"""The program, run in this process or as a user runs it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.frontend.assemble import Frontend
from engine.frontend.client import InProcessClient
from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.llm import LLMEngine


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path_factory):
    import os

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))

    for name in [name for name in os.environ if name.startswith("ENGINE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def program(capsys):
    """Run in this process: exit code, standard output, standard error."""

    def run(*arguments):
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def process():
    """Run as a child process."""

    def run(*arguments, **options):
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)

    return run


def load_beside(folder: str, name: str) -> types.ModuleType:
    """What lies in another test folder, by its path: test folders are no packages (import-mode importlib)."""
    path = Path(__file__).parents[1] / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"cli_tests_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def doubles():
    """A tokenizer of characters and a scripted core."""
    return load_beside("frontend", "doubles")


@pytest.fixture
def make_engine(doubles):
    """An `LLMEngine` on a scripted core; at most 64 tokens (characters) a request."""

    def make(core):
        tokenizer = doubles.CharTokenizer()
        inputs = InputProcessor(tokenizer, doubles.description(), 64)
        return LLMEngine(Frontend(tokenizer, inputs, OutputProcessor(tokenizer), None), InProcessClient(core))

    return make
