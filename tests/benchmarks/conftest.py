"""What the tests of the peers' harness share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.peers.checkpoint import write_checkpoint
from tests.benchmarks.peers.dimensions import Dimensions
from tests.benchmarks.peers.peer import Peer

TINY = Dimensions("tiny", 64, 2, 4, 2, 16, 128, 320, tie_word_embeddings=True, w1_repeats=2)


@pytest.fixture
def fake() -> Callable[..., Peer]:
    """Makes a fake peer: fake("name", fault="short")."""

    def make(name: str = "fake", fault: str = "", steps: tuple[tuple[str, ...], ...] | None = None) -> Peer:
        return Peer(name, "tests.benchmarks.fake_peer", ("bf16",), steps, "counts", environment={"FAKE": fault})

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `TINY`."""
    return write_checkpoint(TINY, tmp_path_factory.mktemp("checkpoints") / "tiny")
