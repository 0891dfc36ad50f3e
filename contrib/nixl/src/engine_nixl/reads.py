"""The exchange of `tcp` without its bytes: who is asked for pages says where they lie, and who asked reads them.

    Want        these blocks                                as ever
    Data        where their pages lie, see `Where`          in place of what they hold
    (a read, by the library, into the pages themselves)
    Want        no blocks: is what I have read still held?
    Data        no blocks: it is                            or Lacking: it was not, and what was read may be anything
    Done        as ever

Nobody is told of a read, so the pages' owner cannot stop one. That is why it is asked at the end: pages that were
held to the end held what they should when they were read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from engine_connectors.tcp.exchange import Block, Exchange, Link, Receiving
from engine_connectors.tcp.messages import Data, Fetch, Ready, Want
from engine_nixl.agent import DONE, UNDER_WAY, Where

if TYPE_CHECKING:
    import zmq

    from engine_nixl.agent import Agent

log = logging.getLogger("engine.connectors.nixl")

LONG_SECONDS = 86_400.0
POLL_MILLISECONDS = 1
"""Between looks at reads under way."""


@dataclass(eq=False)
class Taking:
    """What has become of a transfer's pages that are not missing any more.

    Attributes:
        reading: page by block, by the handle of the read that fills them.
        read: those that are filled, if they were held.
        held: they were.
        over: it ends as soon as nothing is being read.
    """

    reading: dict[Any, dict[Block, int]] = field(default_factory=dict)
    read: dict[Block, int] = field(default_factory=dict)
    held: bool = False
    over: bool = False


class NixlExchange(Exchange):
    """See the module, and `Exchange`.

    Args:
        agent: over the pool; closed with this.
        pool: uint8 [num_pages, page_bytes], in host memory or a GPU's.
    """

    checksum_seed = 0x4E49584C

    def __init__(self, agent: Agent, pool: torch.Tensor, rank: int, address: str, **more: Any) -> None:
        self._agent = agent
        self._device_pool = pool
        self._takings: dict[Receiving, Taking] = {}
        super().__init__(cast("Any", pool), rank, address, **more)

    def fetch(self, fetch: Fetch) -> None:
        """Steps that still use these pages on a GPU come first."""
        if self._device_pool.device.type == "cpu":
            return super().fetch(fetch)
        before = torch.Event(self._device_pool.device)
        before.record()
        self._do(before.synchronize)
        return super().fetch(fetch)

    def close(self) -> None:
        """And take the pool back, where the thread has ended."""
        super().close()
        if not self._thread.is_alive():
            self._takings.clear()  # handles keep the library's agent
            self._agent.close()

    # -- what is sent --------------------------------------------------------------------------------------------------
    def _send(self, link: Link, want: Want, have: dict[Block, int], blocks: list[Block]) -> None:
        parts = [msgspec.msgpack.encode(self._agent.where([have[block] for block in blocks]))] if blocks else []
        self._tell(link, Data(want.transfer, want.question, 0, want.blocks, self._checksum(parts)), parts)

    # -- what is received ----------------------------------------------------------------------------------------------
    def _ready(self, link: Link, ready: Ready) -> None:
        """What was read does not stand where all is told anew; a read under way might still write over what is new."""
        receiving = self._by_transfer.get(ready.transfer)
        if ready.anew and receiving is not None and (taking := self._takings.get(receiving)) is not None:
            taking.read.clear()
            taking.held = False
            taking.over = taking.over or bool(taking.reading)
        super()._ready(link, ready)

    def _fill(self, receiving: Receiving, data: Data, blocks: list[Block], parts: Sequence[zmq.Frame]) -> bool:
        taking = self._takings.setdefault(receiving, Taking())
        if not blocks:
            taking.held = True
            return True
        there = msgspec.msgpack.decode(parts[0].buffer, type=Where)
        pages = [receiving.missing[block] for block in blocks]
        if there.page_bytes != self._device_pool.shape[1] or len(there.pages) != len(pages):
            return False
        try:
            handle = self._agent.read(there, pages)
        except ConnectionError as error:
            log.warning("pages of another engine cannot be read: %s", str(error))
            self.counts["lost"] += 1
            taking.over = True
            return True
        taking.reading[handle] = {block: receiving.missing.pop(block) for block in blocks}
        return True

    def _ask(self, receiving: Receiving) -> None:
        taking = self._takings.setdefault(receiving, Taking())
        if taking.over:
            return self._end(receiving)
        waits = receiving.offered is not None and not receiving.last
        if receiving.missing or taking.held or waits:
            return super()._ask(receiving)
        if taking.reading or receiving.link is None:
            return None
        receiving.question = next(self._questions)  # an answer to an earlier one tells nothing of the last reads
        return self._tell(receiving.link, Want(receiving.transfer, receiving.question, self.identity, []))

    def _patience(self) -> int | None:
        patience = super()._patience()
        reading = any(taking.reading for taking in self._takings.values())
        return min(POLL_MILLISECONDS, POLL_MILLISECONDS if patience is None else patience) if reading else patience

    def _look_at_time(self) -> None:
        for receiving, taking in list(self._takings.items()):
            ended = {handle: self._agent.state(handle) for handle in taking.reading}
            for handle, state in ended.items():
                if state == UNDER_WAY:
                    continue
                pages = taking.reading.pop(handle)
                if state == DONE:
                    taking.read |= pages
                    receiving.deadline = max(receiving.deadline, time.monotonic() + self._timeout)
                else:
                    receiving.missing |= pages
                    self.counts["lost"] += 1
                    taking.over = True
            if any(state != UNDER_WAY for state in ended.values()):
                self._guarded(partial(self._ask, receiving))
        super()._look_at_time()

    def _end(self, receiving: Receiving) -> None:
        """Once nothing is being read: what is not known to have been held has failed."""
        taking = self._takings.setdefault(receiving, Taking())
        if taking.reading:
            taking.over = True
            receiving.deadline = time.monotonic() + LONG_SECONDS
            return
        del self._takings[receiving]
        if not taking.held:
            receiving.missing |= taking.read
        super()._end(receiving)
