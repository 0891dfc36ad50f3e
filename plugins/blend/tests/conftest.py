"""Makes the reference importable, and keeps one folder of a model whose rotary positions are scaled."""

import json
import sys
from pathlib import Path

import pytest

import engine_tiny

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with Llama 3's scaling, which stretches most of its wavelengths."""
    folder, whole = tmp_path_factory.mktemp("scaled"), Path(engine_tiny.__file__).parent / "model"
    for file in whole.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((whole / "config.json").read_text())
    config["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
