"""How ranks meet, tell each other something, and notice who has gone."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")

import engine_cuda.peers
from engine_cuda.peers import Peers


def on_threads(size: int, work: Callable[[int, Peers], Any]) -> list[Any]:
    """work(rank, peers) on a thread each."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as threads:

        def rank(number: int) -> Any:
            peers = Peers(folder, "test", number, size, 20.0)
            try:
                return work(number, peers)
            finally:
                peers.close()

        found = [future.result(60) for future in [threads.submit(rank, r) for r in range(size)]]
        assert not os.listdir(folder), "sockets are left in the ranks' directory"
    return found


@pytest.mark.parametrize("size", [2, 8])
def test_each_rank_hears_what_all_say(size: int) -> None:
    """Of any length, none too, several times."""

    def work(rank: int, peers: Peers) -> list[list[bytes]]:
        return [peers.exchange(bytes([rank]) * (length * rank)) for length in (1, 0, 30_000)]

    expected = [[bytes([r]) * (length * r) for r in range(size)] for length in (1, 0, 30_000)]
    assert on_threads(size, work) == [expected] * size


@pytest.mark.parametrize("lost", [True, False])
def test_a_rank_that_goes_is_noticed(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the watch, and by an exchange. Work under way is released at once from one that is lost, later from one that
    took leave."""
    monkeypatch.setattr(engine_cuda.peers, "GRACE", 0.5)
    all_noticed = threading.Barrier(2)

    def work(rank: int, peers: Peers) -> tuple[str, float]:
        if rank == 2:
            if lost:
                for peer in peers._sockets.values():
                    peer.close()
                peers._sockets = {}
            return "", 0.0
        said, released, start = list[str](), threading.Event(), time.monotonic()
        peers.watch(said.append, released.set)
        assert released.wait(10), "the watch has not noticed"
        seconds = time.monotonic() - start
        assert peers.gone() == 2 and peers.took_leave(2) is not lost
        with pytest.raises(RuntimeError, match="rank 2 has gone"):
            peers.exchange(b"?" * 10)
        all_noticed.wait(10)  # or one that ends first has gone, too
        return said[0], seconds

    *others, _ = on_threads(3, work)
    assert [said for said, _ in others] == ["rank 2 has gone"] * 2
    assert all((seconds >= 0.5) is not lost for _, seconds in others)


def test_a_rank_that_does_not_come() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, missing in ((0, [1, 2]), (1, [0, 2])):
            with pytest.raises(
                RuntimeError, match=rf"rank {rank} of 3 waited 0 s for ranks \[{missing[0]}, {missing[1]}"
            ):
                Peers(folder, "test", rank, 3, 0.2)
            assert not os.listdir(folder)
