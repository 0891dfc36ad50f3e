"""Copying pages of the KV pool: what lets a request go on in the middle of another one's block."""

from __future__ import annotations

import numpy as np
import torch

from engine.interfaces.platform import Platform
from engine.types.plan import PageCopies


def copy_pages(platform: Platform, pool: torch.Tensor, copies: PageCopies) -> None:
    """Copy whole pages of the pool, uint8 [num_pages, page_bytes], in order with the work queued before and after."""
    host = torch.from_numpy(np.stack([copies.source, copies.destination]).astype(np.int64))
    places = torch.empty(host.shape, dtype=host.dtype, device=pool.device)
    platform.to_device(host, places)
    source, destination = places
    pool.index_copy_(0, destination, pool.index_select(0, source))
