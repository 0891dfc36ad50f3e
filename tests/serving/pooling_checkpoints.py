"""Tiny random checkpoints of models that pool, as the core's own tests make them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_HELPERS = Path(__file__).parents[2] / "plugins" / "reference" / "tests"


def make_encoder(folder: Path, architecture: str, **features: Any) -> Path:
    """A BERT, perhaps with a classification head."""
    if str(_HELPERS / "parity") not in sys.path:
        sys.path.insert(0, str(_HELPERS / "parity"))
    spec = importlib.util.spec_from_file_location("serving_pooling_models", _HELPERS / "pooling" / "pooling_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.encoder_checkpoint(folder, architecture, **features)
    return folder
