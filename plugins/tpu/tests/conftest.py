"""Tests of the JAX worker need JAX, which `make test P=plugins/tpu` installs: without it they are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))


@pytest.fixture(scope="session", autouse=True)
def devices() -> None:
    """Eight processor devices with 64-bit numbers, set before anything begins with JAX."""
    try:
        import jax
    except ImportError:
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Makes random checkpoints, each once."""
    from jax_engines import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("jax"))
