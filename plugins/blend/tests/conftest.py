"""Makes the reference importable, and keeps folders of models with other configs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import engine_tiny

sys.path.insert(0, str(Path(__file__).parent))


def changed(folder: Path, **config: Any) -> str:
    """The bundled model in a folder, with another config."""
    whole = Path(engine_tiny.__file__).parent / "model"
    for file in whole.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(json.loads((whole / "config.json").read_text()) | config))
    return str(folder)


@pytest.fixture(scope="session")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with Llama 3's scaling, which stretches most of its wavelengths."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return changed(tmp_path_factory.mktemp("scaled"), rope_scaling=scaling)


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with sliding windows, as Mistral has them."""
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
    return changed(tmp_path_factory.mktemp("windowed"), **mistral)
