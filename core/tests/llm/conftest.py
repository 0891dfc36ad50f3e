from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.frontend.assemble import Frontend, InProcessClient
from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.llm import LLMEngine
from engine_kit.llm import LLM


def _load(folder: str, name: str) -> ModuleType:
    # Test folders are no packages (import-mode importlib), so what lies in another one is loaded by its path.
    tests = Path(__file__).parents[3] / "plugins" / "reference" / "tests", Path(__file__).parents[1]
    path = next(path for one in tests if (path := one / folder / f"{name}.py").exists())
    spec = importlib.util.spec_from_file_location(f"llm_tests_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def doubles() -> ModuleType:
    """A tokenizer of characters and a scripted core."""
    return _load("frontend", "doubles")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints(name, **features)` is the folder of a tiny random checkpoint, made once."""
    make = _load("parity", "checkpoints").make_checkpoint
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def checkpoint(name: str, **features: Any) -> Path:
        if name not in made:
            made[name] = make(root / name, **features)
        return made[name]

    return checkpoint


@pytest.fixture
def make_llm(doubles: ModuleType) -> Callable[[Any], LLM]:
    """An `LLM` on a scripted core."""

    def make(core: Any) -> LLM:
        tokenizer = doubles.CharTokenizer()
        inputs = InputProcessor(tokenizer, doubles.description(), 64)
        frontend = Frontend(tokenizer, inputs, OutputProcessor(tokenizer), None)  # type: ignore[arg-type]
        return LLM.from_engine(LLMEngine(frontend, InProcessClient(core)))

    return make
