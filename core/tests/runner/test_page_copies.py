"""Copies of pages are whole and exact, whatever the bytes."""

from __future__ import annotations

import numpy as np
import torch

from engine.runner.buffers import copy_pages
from engine.types.plan import PageCopies


class Here:
    """A platform whose memory is the host's."""

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(host)


def test_pages_are_copied_byte_by_byte() -> None:
    pool = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (9, 37)).astype(np.uint8))
    before = pool.clone()
    source, destination = np.array([3, 3, 1], np.int32), np.array([2, 8, 5], np.int32)
    copy_pages(Here(), pool, PageCopies(table=np.zeros(3, np.int32), source=source, destination=destination))  # type: ignore[arg-type]
    expected = before.clone()
    expected[[2, 8, 5]] = before[[3, 3, 1]]
    assert torch.equal(pool, expected)
