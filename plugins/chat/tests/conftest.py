"""The program in this process, an engine on a scripted core, and a server that says what it is told."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.frontend.assemble import Frontend, InProcessClient
from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.llm import LLMEngine

HERE = Path(__file__).parent
DOUBLES = HERE.parents[2] / "core" / "tests" / "frontend" / "doubles.py"


def load(path: Path) -> types.ModuleType:
    """A module by its path: test folders are no packages (import-mode importlib)."""
    spec = importlib.util.spec_from_file_location(f"chat_tests_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path_factory):
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
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)

    return run


@pytest.fixture(scope="session")
def doubles():
    """The core's: a tokenizer of characters and a scripted core."""
    return load(DOUBLES)


@pytest.fixture
def make_engine(doubles):
    """An `LLMEngine` on a scripted core; at most 64 tokens (characters) a request."""

    def make(core):
        tokenizer = doubles.CharTokenizer()
        inputs = InputProcessor(tokenizer, doubles.description(), 64)
        return LLMEngine(Frontend(tokenizer, inputs, OutputProcessor(tokenizer), None), InProcessClient(core))

    return make


@pytest.fixture
def server():
    """A server that says what it is told; see `stub_server.Stub`."""
    with load(HERE / "stub_server.py").serving() as stub:
        yield stub
