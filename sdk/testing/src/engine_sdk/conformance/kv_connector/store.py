"""A core and its ranks around a connector that stores, and requests whose blocks come and go."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.interfaces.kv_connector import LATER, Found, KVConnectorScheduler, KVConnectorWorker, Pages
from engine.types.kv import KVGroup, KVLayout, KVTable

TOKENS = 16
"""Of a block."""
SECONDS = 10.0
"""What travels by itself has so long, on a busy machine too."""


def two_layers(page_bytes: int, mark_bytes: int = 0) -> KVLayout:
    """Two layers in the pages of one table, and a mark behind them."""
    table = KVTable(index=0, kind="full", window=None, tokens_per_block=TOKENS)
    group = KVGroup(
        index=0, kind="full", sites=(0, 1), num_kv_heads=1, head_size=1, sliding_window=None, tokens_per_block=TOKENS,
        layer_bytes=(page_bytes - mark_bytes) // 2, page_format="conformance",
    )  # fmt: skip
    return KVLayout(block_size=TOKENS, page_bytes=page_bytes, tables=(table,), groups=(group,), mark_bytes=mark_bytes)


@dataclass
class Asked:
    """A request, see `engine.interfaces.kv_connector.Transferable`. `name` makes its blocks' keys."""

    request_id: str
    blocks: int
    name: str = "one"
    kv_transfer: dict[str, Any] | None = None
    num_prompt_tokens: int = 0
    num_loadable: int = 0
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.blocks * TOKENS + 1
        self.num_loadable = self.blocks * TOKENS
        self.token_ids = np.arange(self.num_prompt_tokens, dtype=np.int32)

    def block_keys(self, table: int) -> list[bytes]:
        return [f"{self.name} {block}".encode().ljust(16, b".") for block in range(self.blocks)]


class Store:
    """See the module.

    Args:
        core: the scheduler half.
        workers: the worker halves, registered with `pools`.
        pools: uint8 [num_pages, page_bytes], one on each rank.
        layerwise: the workers are called for each of two layers.
        mark_bytes: at each page's end, behind the layers.
    """

    def __init__(
        self,
        core: KVConnectorScheduler,
        workers: Sequence[KVConnectorWorker],
        pools: Sequence[torch.Tensor],
        layerwise: bool,
        mark_bytes: int = 0,
    ) -> None:
        self.core = core
        self.workers = workers
        self.pools = pools
        self.layerwise = layerwise
        self.mark_bytes = mark_bytes
        self._layer_bytes = (pools[0].shape[1] - mark_bytes) // 2
        self.loaded: list[str] = []
        self.sent: list[str] = []
        self.failed: set[int] = set()
        self._step = 0
        self._random = np.random.default_rng(0)

    def scribble(self, pages: Iterable[int], site: int | None = None) -> None:
        """Other bytes in these pages, or in one layer's part of them."""
        self._write(pages, slice(None) if site is None else self._layer(site))

    def mark(self, pages: Iterable[int]) -> None:
        """Other bytes behind their layers."""
        self._write(pages, slice(2 * self._layer_bytes, None))

    def _layer(self, site: int) -> slice:
        return slice(site * self._layer_bytes, (site + 1) * self._layer_bytes)

    def _write(self, pages: Iterable[int], part: slice) -> None:
        for pool in self.pools:
            for page in pages:
                there = pool[page, part]
                there.copy_(torch.from_numpy(self._random.integers(0, 256, there.shape[0], np.uint8)))

    def content(self, pages: Sequence[int]) -> list[torch.Tensor]:
        """What they hold, on each rank."""
        return [pool[list(pages)].cpu().clone() for pool in self.pools]

    def step(
        self,
        overwrites: Sequence[int] = (),
        expected: Sequence[torch.Tensor] = (),
        into: Sequence[int] = (),
        computes: Sequence[int] = (),
    ) -> None:
        """Plan, run and take a step. It overwrites pages when all is loaded.

        expected, into: what these pages have to hold, layer by layer where the connector goes so.
        computes: pages that the step fills, layer by layer.
        """
        self._step += 1
        section = self.core.plan_section()
        assert section is None or isinstance(section, bytes), f"plan_section answers {type(section).__name__}"
        for worker in self.workers:
            worker.begin(self._step, section)
        for worker in self.workers:
            worker.load(self._step)
        for site in (0, 1):
            for rank, worker in enumerate(self.workers if self.layerwise else ()):
                worker.before_layer(site)
                if expected:
                    mine = self._layer(site)
                    there = self.pools[rank][list(into)].cpu()[:, mine]
                    assert torch.equal(there, expected[rank][:, mine]), f"layer {site} is read before it is there"
            self.scribble(computes, site)
            for worker in self.workers if self.layerwise else ():
                worker.after_layer(site)
        self.scribble(overwrites)
        for worker in self.workers:
            worker.end(self._step)
        news = [worker.news() for worker in self.workers]
        assert all(told is None or isinstance(told, bytes) for told in news), f"news are {news!r:.200}"
        if any(told is not None for told in news):
            told = self.core.take([one for one in news if one is not None])
            failed = told.failed
            assert isinstance(failed, np.ndarray) and failed.dtype == np.int32, "failed pages are no int32 array"
            self.loaded += told.loaded
            self.sent += told.sent
            self.failed.update(failed.tolist())
        self.core.check_integrity()

    def save(self, request: Asked, pages: Sequence[int]) -> list[torch.Tensor]:
        """A request computes its blocks into these pages, and ends; then others overwrite them. Returns what they
        held."""
        self.scribble(pages)
        kept = self.content(pages)
        self.core.lookup(request, 0)
        of_table = [Pages(0, 0, np.array(pages, np.int32))]
        self.core.computed(request, of_table, len(pages) * TOKENS)
        self.step()
        held = self.core.finished(request, of_table)
        assert not held.seconds, "a request without kv_transfer holds its pages"
        self.step(overwrites=pages)
        return kept

    def find(self, request: Asked, num_blocks: int, num_local: int = 0) -> Found:
        """What there is of a request beyond what is local, once so many blocks of it have come to rest: a store may
        write one after the other."""
        deadline = time.monotonic() + SECONDS
        while True:
            found = self.core.lookup(request, num_local)
            if found is not None and found != LATER and found.num_tokens >= num_blocks * TOKENS:
                break
            assert time.monotonic() < deadline, f"{num_blocks} blocks that were saved are not found: {found}"
            if found not in (None, LATER):
                self.core.aborted(request.request_id)  # and what it was told is forgotten
            time.sleep(0.001)
            self.step()
        assert found.num_tokens == num_blocks * TOKENS, f"{found.num_tokens} tokens found, {num_blocks} blocks saved"
        return found

    def answer(self, request: Asked) -> Found | None:
        """What the first lookup says that is no LATER."""
        deadline = time.monotonic() + SECONDS
        while (found := self.core.lookup(request, 0)) == LATER:
            assert time.monotonic() < deadline, "lookup says LATER for ever"
            time.sleep(0.001)
        return found

    def bring(
        self, request: Asked, found: Found, pages: Sequence[int], first: int, kept: Sequence[torch.Tensor]
    ) -> None:
        """Have pages filled with a request's blocks from `first` on; all that is not told as failed holds `kept`."""
        places = [Pages(0, first, np.array(pages, np.int32))]
        self.core.allocated(request, places, first * TOKENS, first * TOKENS + len(pages) * TOKENS)
        if found.asynchronous:
            self.until_loaded(request.request_id)
        else:
            self.step(expected=() if self.failed else kept, into=pages)
        for rank, there in enumerate(self.content(pages)):
            for place, page in enumerate(pages):
                right = page in self.failed or torch.equal(there[place], kept[rank][place])
                assert right, f"page {page} of rank {rank} holds other bytes than were saved"

    def until_loaded(self, request_id: str) -> None:
        """Steps until the load of a request has ended on all ranks."""
        deadline = time.monotonic() + SECONDS
        while request_id not in self.loaded:
            assert time.monotonic() < deadline, f"the end of the load of {request_id!r} is never told"
            self.step()
            time.sleep(0.001)
        assert self.loaded.count(request_id) == 1, "the end of a load is told twice"

    def close(self) -> None:
        """Both halves."""
        self.core.close()
        for worker in self.workers:
            worker.close()
