"""The worker half of the plain connector between engines, which are of one process: each leaves frames with the others,
and reads its own when it steps."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec
import torch
from plain_peer_scheduler import PeerNews, PeerSection

from engine.interfaces.kv_connector import KVConnectorWorker

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

PATIENCE = 25
"""Steps without a page after which the missing ones are asked for again."""
MOST_QUESTIONS = 4


class Frame(NamedTuple):
    """Kinds: "want" has blocks; "page" has a page's bytes, and their checksum; "lacking"; "done"."""

    kind: str
    sender: str
    transfer: str
    question: int = 0
    blocks: tuple[int, ...] = ()
    page: bytes = b""
    checksum: int = 0


class Fetching:
    """A request whose pages are being filled."""

    def __init__(self, request_id: str, sender: str, transfer: str, missing: dict[int, int]) -> None:
        self.request_id = request_id
        self.sender = sender
        self.transfer = transfer
        self.missing = missing
        self.question = 0
        self.patience = 0


class PlainPeer(KVConnectorWorker):
    """See the module. The option `name` is the engine's."""

    living: ClassVar[dict[tuple[str, int], PlainPeer]] = {}

    def __init__(self, context: WorkerContext) -> None:
        self.name: str = context.options.name  # type: ignore[union-attr]
        self.rank = context.start.place.rank
        self.inbox: deque[Frame] = deque()
        self.offers: dict[str, dict[int, int]] = {}
        self.fetches: dict[str, Fetching] = {}  # by transfer
        self.told = PeerNews(rank=self.rank)
        self.disturbed: Callable[[Frame], Iterable[Frame]] = lambda frame: [frame]
        self.living[self.name, self.rank] = self

    def register(self, pool: torch.Tensor) -> None:
        """The pool."""
        self.pool = pool

    def close(self) -> None:
        """It is not there any more."""
        self.living.pop((self.name, self.rank), None)

    def post(self, receiver: str, frame: Frame) -> None:
        """To an engine's rank, if it lives."""
        other = self.living.get((receiver, self.rank))
        for one in self.disturbed(frame) if frame.kind == "page" else [frame]:
            if other is not None:
                other.inbox.append(one)

    def begin(self, step_id: int, section: bytes | None) -> None:
        """What was decided."""
        decided = PeerSection() if section is None else msgspec.msgpack.decode(section, type=PeerSection)
        for transfer in decided.withdrawn:
            self.offers.pop(transfer, None)
        self.offers.update(decided.offers)
        for fetch in decided.fetches:
            fetching = Fetching(*fetch)
            self.fetches[fetching.transfer] = fetching
            self.ask(fetching)
        for fetching in [one for one in self.fetches.values() if one.request_id in decided.cancelled]:
            self.cancel(fetching)
        for engine, transfer in decided.unwanted:
            self.post(engine, Frame("done", self.name, transfer))

    def load(self, step_id: int) -> None:
        """What has come, and what has not."""
        while self.inbox:
            frame = self.inbox.popleft()
            getattr(self, f"hear_{frame.kind}")(frame)
        for fetching in list(self.fetches.values()):
            fetching.patience -= 1
            if self.gone(fetching):
                self.settle(fetching)
            elif not fetching.patience:
                self.ask(fetching)

    def gone(self, fetching: Fetching) -> bool:
        """Whether nothing will come any more."""
        return (fetching.sender, self.rank) not in self.living

    def ask(self, fetching: Fetching) -> None:
        """For all that is missing."""
        fetching.question += 1
        fetching.patience = PATIENCE
        if fetching.question > MOST_QUESTIONS:
            return self.settle(fetching)
        want = Frame("want", self.name, fetching.transfer, fetching.question, tuple(fetching.missing))
        return self.post(fetching.sender, want)

    def cancel(self, fetching: Fetching) -> None:
        """Its request was aborted."""
        self.settle(fetching)

    def settle(self, fetching: Fetching) -> None:
        """Nothing is written any more."""
        del self.fetches[fetching.transfer]
        self.told.fetched.append(fetching.request_id)
        self.told.failed += fetching.missing.values()
        self.post(fetching.sender, Frame("done", self.name, fetching.transfer))

    def hear_want(self, want: Frame) -> None:
        """Send what is there."""
        offer = self.offers.get(want.transfer, {})
        if not offer.keys() >= {*want.blocks}:
            return self.post(want.sender, Frame("lacking", self.name, want.transfer, want.question))
        for block in want.blocks:
            page = self.pool[offer[block]].numpy().tobytes()
            frame = Frame("page", self.name, want.transfer, want.question, (block,), page, zlib.crc32(page))
            self.post(want.sender, frame)
        return None

    def hear_page(self, frame: Frame) -> None:
        """Write what was asked for and is whole."""
        fetching = self.fetches.get(frame.transfer)
        if fetching is None or fetching.question != frame.question or frame.blocks[0] not in fetching.missing:
            return
        if self.whole(frame):
            self.pool[fetching.missing.pop(frame.blocks[0])] = torch.frombuffer(
                bytearray(frame.page), dtype=torch.uint8
            )
        if not fetching.missing:
            self.settle(fetching)

    def whole(self, frame: Frame) -> bool:
        """Whether it is what was sent."""
        return zlib.crc32(frame.page) == frame.checksum

    def hear_lacking(self, frame: Frame) -> None:
        """Nothing comes."""
        if (fetching := self.fetches.get(frame.transfer)) is not None and fetching.question == frame.question:
            self.settle(fetching)

    def hear_done(self, frame: Frame) -> None:
        """Nobody wants it."""
        if self.offers.pop(frame.transfer, None) is not None:
            self.told.sent.append(frame.transfer)

    def news(self) -> bytes | None:
        """What has ended."""
        told, self.told = self.told, PeerNews(rank=self.rank)
        return None if told == PeerNews(rank=self.rank) else msgspec.msgpack.encode(told)
