"""One rank's end of all transfers: a thread with ZeroMQ sockets, beside the one that computes. No torch.

Pages go from the pool to the network without a copy, but for those that are being computed, of which each layer's part
is copied when it is there; what comes is checked where the library has put it, and then written to its page. ZeroMQ's
own threads move the bytes, so this one handles a frame of a megabyte at a time.

A page that is given out again while its bytes wait in the system's queue goes out with other content than its checksum
tells of: who gets it sees that, and it concerns nobody who still waits.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import random
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import zmq
from xxhash import xxh3_64
from zmq.utils.monitor import recv_monitor_message

from engine.types.errors import ConfigError
from engine_connectors.tcp.messages import (
    WHOLE,
    Blocks,
    Data,
    Done,
    ExchangeNews,
    Fetch,
    Follow,
    Lacking,
    Message,
    Offer,
    Ready,
    TablePages,
    Want,
)

log = logging.getLogger("engine.connectors.tcp")

FRAME_BYTES = 1 << 20
"""Of a frame, about; a page is never cut."""
WINDOW_BYTES = 32 << 20
"""That are asked for and have not come, of one transfer: so much memory an answer may take beside the pages."""
MOST_STAGED_BYTES = 512 << 20
"""Of copies of what is being computed. What is more than that is read when the prompt is computed."""
MOST_REMEMBERED = 4096
"""Pushes that came before their room, questions before their pages, and transfers that have ended: so many of each."""
MOST_BLOCKS = 1 << 20
"""That one message may name."""
MOST_PART_BYTES = 32 << 20
"""Of one part of a message, beside a page: who sends more is cut off, before it is held in memory."""
MOST_RETRIES = 3
"""Questions that a transfer may ask again, because frames were damaged or did not come."""
MOST_WAITING = 64
"""Messages that have come over one connection and were not looked at: then the other end has to wait."""
MOST_UNSENT = 1 << 16
"""Messages that one end has not taken, before more are lost: they tell where bytes lie, and hold none."""
HEARTBEAT_MILLISECONDS = 1000
HEARTBEAT_TIMEOUT_MILLISECONDS = 5000
"""Without any sign of life of the other end, the connection is over."""
CLOSE_SECONDS = 5.0
OTHERS = "an engine with another model, dtype, page format or division over ranks"

T = TypeVar("T")
Block = tuple[int, int]
"""(table, block)."""


@dataclass(eq=False)
class Link:
    """A way to one rank of another engine. `peer`: its name at our listening socket; None: the socket has one peer."""

    socket: zmq.Socket[bytes]
    peer: bytes | None = None
    address: str = ""
    monitor: zmq.Socket[bytes] | None = None


class Staged(NamedTuple):
    """A layer's part of blocks first, first + 1, ... of one table: uint8 [blocks, bytes]."""

    first: int
    content: np.ndarray


@dataclass(eq=False)
class Sending:
    """What others may read.

    Attributes:
        pages: of whole blocks.
        staged: copies of what is being computed, by table and part.
        reserved: bytes that these may take.
        address: whom to tell.
        link: who asked to be told.
        last: nothing is computed any more.
    """

    pages: dict[Block, int] = field(default_factory=dict)
    staged: dict[tuple[int, int], list[Staged]] = field(default_factory=dict)
    reserved: int = 0
    address: str = ""
    link: Link | None = None
    last: bool = False


@dataclass(eq=False)
class Receiving:
    """Pages that are being filled.

    Attributes:
        pages: page by block, in order.
        missing: of these, those that are not whole yet.
        unasked: of these, those that no question that is open has named.
        early: (block, part) that are asked for while the prompt is computed.
        parts: of each block that is missing, a bit for each part that is there.
        offered: of a push, or where it follows: those that can be asked for; None: all can.
        question: whose answers count. Earlier ones' come too late.
        deadline: when it is taken for lost.
    """

    request_id: str
    transfer: str
    pages: dict[Block, int]
    missing: dict[Block, int]
    unasked: dict[Block, int]
    deadline: float
    early: set[tuple[Block, int]] = field(default_factory=set)
    parts: Counter[Block] = field(default_factory=Counter)
    link: Link | None = None
    offered: set[Block] | None = None
    last: bool = False
    question: int = 0
    retries: int = 0
    next_number: int = 0


class Exchange:
    """See the module. All methods are for one thread; none waits for the network.

    Args:
        pool: uint8 [num_pages, page_bytes], in host memory.
        rank: for the news.
        address: to listen at, e.g. "tcp://127.0.0.1:14579".
        secret_key: Z85, 40 characters, the same on all engines; None: nothing is encrypted, and who connects is asked
            for nothing.
        timeout: seconds without a frame after which what is missing is asked for again, and then given up.
        push_timeout: seconds in which a push has to begin, and to go on.
        parts: by KV table, which bytes of its pages belong to each layer; none: pages go as a whole.

    Attributes:
        identity, engine_id: of this engine, and what the names of its transfers begin with; set before anything is
            offered or fetched.
        counts: frames and transfers by what was odd about them: "damaged", "late", "doubled", "reordered", "unread",
            "lost", "lacking", "unreachable", "refused".

    Raises ConfigError where it cannot listen.
    """

    checksum_seed = 0
    """Another one where frames hold something else: an end of another kind takes them for damaged."""

    def __init__(
        self,
        pool: np.ndarray,
        rank: int,
        address: str,
        *,
        secret_key: str | None = None,
        timeout: float = 5.0,
        push_timeout: float = 30.0,
        parts: Mapping[int, Sequence[slice]] | None = None,
    ) -> None:
        self._pool = pool
        self._parts = parts or {}
        self._reserved = 0  # bytes of copies, of all sendings
        self._rank = rank
        self.identity = b""
        self.engine_id = ""
        self._secret_key = secret_key
        self._timeout = timeout
        self._push_timeout = push_timeout
        self.counts: Counter[str] = Counter()
        self._told_counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # over sendings and what is read of their pages, and over the news
        self._sendings: dict[str, Sending] = {}
        self._fetched: list[str] = []
        self._failed: list[int] = []
        self._sent: list[str] = []
        self._receivings: dict[str, Receiving] = {}
        self._by_transfer: dict[str, Receiving] = {}
        self._early: OrderedDict[str, list[tuple[Link, Ready]]] = OrderedDict()
        self._early_wants: OrderedDict[str, list[tuple[Link, Want]]] = OrderedDict()
        self._followers: OrderedDict[str, Link] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()
        self._links: dict[str, Link] = {}
        self._questions = itertools.count(random.getrandbits(48))
        self._places: dict[str, str] = {}  # addresses by name, of those that are connected
        self._sought: dict[str, list[Callable[[str], None]]] = {}  # names that are being looked up
        self._commands: deque[Callable[[], None]] = deque()
        self._nudging = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._context = zmq.Context()
        self._wake = self._context.socket(zmq.PAIR)
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._listener = self._socket(zmq.ROUTER)
        if secret_key is not None:
            self._listener.curve_server = True
        self._closed = False
        try:
            self._listener.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            remedy = "set another --kv-connector.port, or --kv-connector.host to an address of this machine"
            raise ConfigError(f"listen for other engines at {address}", error.strerror or str(error), remedy) from error
        self._listening = Link(self._listener)
        self._thread = threading.Thread(target=self._run, name=f"kv-tcp-{rank}", daemon=True)
        self._thread.start()

    # -- called by the worker ------------------------------------------------------------------------------------------
    def offer(self, offer: Offer) -> None:
        """Let these pages be read from now on, until `withdraw`; tell `offer.address` of them, where it is given."""
        pages = _by_block(offer.pages)
        with self._lock:
            sending = self._sendings.setdefault(offer.transfer, Sending())
            sending.pages |= pages
            sending.address = offer.address
            sending.last = offer.last
            if offer.anew:  # copies of what was computed before do not stand, for those who ask from now on
                sending.staged.clear()
        ready = Ready(offer.transfer, self.identity, _ranges(pages), offer.last, anew=offer.anew)

        def tell() -> None:
            if offer.transfer in self._over and not offer.address:  # nobody wants it since before it was there
                self._leave(offer.transfer)
                return
            self._tell_ready(sending, ready)
            self._answer(offer.transfer)

        self._do(tell)

    def reserve(self, transfer: str, size: int) -> bool:
        """Room for copies of what is being computed, of so many bytes; False where there is none, or no use for it."""
        with self._lock:
            if transfer in self._over or self._reserved + size > MOST_STAGED_BYTES:
                return False
            sending = self._sendings.setdefault(transfer, Sending())
            sending.reserved += size
            self._reserved += size
        return True

    def stage(self, chunk: Offer, table: int, part: int, first: int, content: np.ndarray) -> None:
        """Let one layer's part of blocks from `first` on be read, of a transfer for which room is reserved.

        content: uint8 [blocks, bytes], in a row, and not written to any more.
        """
        with self._lock:
            if (sending := self._sendings.get(chunk.transfer)) is None:
                return  # nobody wants it any more
            sending.address = chunk.address
            sending.staged.setdefault((table, part), []).append(Staged(first, content))
        ready = Ready(chunk.transfer, self.identity, [(table, first, len(content))], last=False, part=part)
        self._do(lambda: self._tell_ready(sending, ready))

    def withdraw(self, transfer: str) -> None:
        """Nobody reads its pages any more when this returns. Whom they were pushed to hears that there are no more."""
        with self._lock:
            sending = self._gone(transfer)

        def tell() -> None:
            self._remember(transfer)
            if sending is not None:
                self._tell_ready(sending, Ready(transfer, self.identity, [], last=True, anew=True))

        self._do(tell)

    def _gone(self, transfer: str) -> Sending | None:
        """Nobody reads it any more. Under the lock."""
        sending = self._sendings.pop(transfer, None)
        if sending is not None:
            self._reserved -= sending.reserved
        return sending

    def fetch(self, fetch: Fetch) -> None:
        """Fill these pages; the news tell when that has ended."""
        pages = _by_block(fetch.pages)
        self._do(lambda: self._begin(fetch, pages))

    def cancel(self, request_id: str) -> None:
        """End a fetch; the news tell when that has happened."""
        self._do(lambda: self._cancel(request_id))

    def release(self, address: str, transfer: str) -> None:
        """Tell another engine that its pages are not wanted; without an address, once it says that they are ready."""

        def tell() -> None:
            if address:
                return self._tell_at(address, Done(transfer))
            self._remember(transfer)
            for link, ready in self._early.pop(transfer, ()):
                self._ready(link, ready)
            return None

        self._do(tell)

    def news(self) -> ExchangeNews | None:
        """What has happened since the last call."""
        with self._lock:
            counts = Counter(self.counts)
            new = dict(counts - self._told_counts)
            if not (self._fetched or self._sent or new):
                return None
            news = ExchangeNews(
                rank=self._rank, fetched=self._fetched, failed=self._failed, sent=self._sent, counts=new
            )
            self._told_counts = counts
            self._fetched = []
            self._failed = []
            self._sent = []
        return news

    def close(self) -> None:
        """End the thread; the pool is not looked at any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._nudge()
        self._thread.join(CLOSE_SECONDS)
        with self._nudging:
            self._wake.close(linger=0)
        if self._thread.is_alive():
            log.warning("the thread of rank %d's transfers has not ended in %g s", self._rank, CLOSE_SECONDS)
            return
        self._context.destroy(linger=0)

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._nudge()

    def _nudge(self) -> None:
        """Let the thread look. Never waits: where it cannot be told, it has a thousand nudges to read, or has ended."""
        with self._nudging, contextlib.suppress(zmq.ZMQError):
            self._wake.send(b"", zmq.NOBLOCK)

    # -- the thread ----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._poller.register(self._listener, zmq.POLLIN)
        try:
            while not self._closed:
                for socket, _ in self._poller.poll(self._patience()):
                    self._guarded(partial(self._hear, socket))
                while self._commands:
                    self._guarded(self._commands.popleft())
                self._guarded(self._look_at_time)
        except zmq.ContextTerminated:
            pass
        finally:
            for link in list(self._links.values()):
                self._drop(link)
            self._listener.close(linger=0)
            self._woken.close(linger=0)

    def _patience(self) -> int | None:
        """Milliseconds until the next deadline; None: there is none."""
        if not self._receivings:
            return None
        first = min(receiving.deadline for receiving in self._receivings.values())
        return max(0, round(1000 * (first - time.monotonic()))) + 1

    def _guarded(self, act: Callable[[], None]) -> None:
        """What another engine sends, or a fault of ours over it, must not end the thread: others wait for it."""
        try:
            act()
        except zmq.ContextTerminated:
            raise
        except Exception:
            self.counts["unread"] += 1
            log.warning("a message of another engine could not be handled", exc_info=True)

    def _hear(self, socket: zmq.Socket[bytes]) -> None:
        if socket is self._woken:
            with contextlib.suppress(zmq.Again):
                self._woken.recv(zmq.NOBLOCK)
            return
        links = (self._listening, *self._links.values())
        link = next((one for one in links if socket in (one.socket, one.monitor)), None)
        if link is None:  # which another event of this turn has ended
            return
        if socket is link.monitor:
            self._over_with(link)
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(64):  # then others have their turn
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                way = link
                if link is self._listening:
                    sender, *frames = frames
                    way = Link(socket, sender.bytes)
                self._guarded(partial(self._take, way, frames))

    def _take(self, link: Link, frames: Sequence[zmq.Frame]) -> None:
        message = self._decode(frames[0].buffer)
        match message:
            case Data():
                self._data(message, frames[1:])
            case Want():
                self._want(link, message)
            case Lacking():
                receiving = self._by_transfer.get(message.transfer)
                if receiving is not None and receiving.question == message.question:
                    self.counts["lacking"] += 1
                    if message.part == WHOLE:
                        return self._end(receiving)
                    receiving.early.difference_update((block, message.part) for block in _each(message.blocks))
                    return self._ask(receiving)
            case Ready():
                self._ready(link, message)
            case Follow():
                self._follow(link, message.transfer)
            case Done():
                self._remember(message.transfer)
                self._leave(message.transfer)
        return None

    def _leave(self, transfer: str) -> None:
        """Nobody wants what this engine has of it."""
        with self._lock:
            if self._gone(transfer) is not None:
                self._sent.append(transfer)

    def _answer(self, transfer: str) -> None:
        """What was asked before it was there."""
        for link, want in self._early_wants.pop(transfer, ()):
            self._want(link, want)

    def _follow(self, link: Link, transfer: str) -> None:
        """Somebody waits for what is computed."""
        if transfer in self._over:
            return self._tell(link, Ready(transfer, self.identity, [], last=True, anew=True))
        with self._lock:
            sending = self._sendings.get(transfer)
            if sending is None:
                self._followers[transfer] = link
                while len(self._followers) > MOST_REMEMBERED:
                    self._followers.popitem(last=False)
                return None
            sending.link = link
            told = [
                Ready(transfer, self.identity, [(table, first, len(content))], last=False, part=part)
                for (table, part), several in sending.staged.items()
                for first, content in several
            ]
            told += [Ready(transfer, self.identity, _ranges(sending.pages), sending.last)] * sending.last
        for ready in told:
            self._tell(link, ready)
        return None

    def _tell_ready(self, sending: Sending, ready: Ready) -> None:
        """To whom it is pushed, or who follows."""
        if sending.address:
            return self._tell_at(sending.address, ready)
        sending.link = sending.link or self._followers.pop(ready.transfer, None)
        return None if sending.link is None else self._tell(sending.link, ready)

    # -- what is sent --------------------------------------------------------------------------------------------------
    def _want(self, link: Link, want: Want) -> None:
        """Send what is there. The lock is held while pages are read, so none may ask for more than a window."""
        if want.part != WHOLE:
            return self._want_part(link, want)
        blocks = list(_each(want.blocks))
        if len(blocks) > max(1, WINDOW_BYTES // self._pool.shape[1]):
            raise ValueError(f"{len(blocks)} blocks are asked for at once")
        with self._lock:
            sending = self._sendings.get(want.transfer)
            if sending is None and want.transfer.startswith(self.engine_id) and want.transfer not in self._over:
                return _keep(self._early_wants, want.transfer, link, want)
            have = None if sending is None or want.identity != self.identity else sending.pages
            lacking = [block for block in blocks if have is None or block not in have]
            if have is None or lacking:
                self.counts["lacking"] += 1
                return self._tell(link, Lacking(want.transfer, want.question, _ranges(lacking)))
            self._send(link, want, have, blocks)
        return None

    def _send(self, link: Link, want: Want, have: dict[Block, int], blocks: list[Block]) -> None:
        """Answer with these blocks, of `have`. Called with the lock."""
        per_frame = max(1, FRAME_BYTES // self._pool.shape[1])
        for number, start in enumerate(range(0, len(blocks), per_frame)):
            part = blocks[start : start + per_frame]
            parts = [self._pool[page : page + count].reshape(-1).data for page, count in _runs(have, part)]
            data = Data(want.transfer, want.question, number, _ranges(part), self._checksum(parts))
            self._tell(link, data, parts)

    def _checksum(self, parts: Iterable[Any]) -> int:
        """Of all parts of a frame, one after the other."""
        checksum = xxh3_64(seed=self.checksum_seed)
        for one in parts:
            checksum.update(one)
        return int(checksum.intdigest())

    def _want_part(self, link: Link, want: Want) -> None:
        """Send what is staged of a layer; what is not, is to be asked for when the whole is there."""
        number = 0
        for table, first, count in want.blocks:
            with self._lock:
                sending = self._sendings.get(want.transfer)
                known = () if sending is None else sending.staged.get((table, want.part), ())
                found = [one for one in known if one.first <= first and first + count <= one.first + len(one.content)]
            if not found or count <= 0 or want.identity != self.identity:
                self._tell(link, Lacking(want.transfer, want.question, [(table, first, count)], want.part))
                continue
            content = found[-1].content[first - found[-1].first :][:count]
            per_frame = max(1, FRAME_BYTES // content.shape[1])
            for start in range(0, count, per_frame):
                rows = content[start : start + per_frame].reshape(-1).data
                blocks = [(table, first + start, len(rows) // content.shape[1])]
                data = Data(want.transfer, want.question, number, blocks, self._checksum([rows]), want.part)
                self._tell(link, data, [rows])
                number += 1

    def _tell(self, link: Link, message: Message, parts: Sequence[Any] = ()) -> None:
        head = [self._encode(message)] if link.peer is None else [link.peer, self._encode(message)]
        with contextlib.suppress(zmq.Again, zmq.ZMQError):  # it has gone: nobody waits for this
            link.socket.send_multipart([*head, *parts], zmq.NOBLOCK, copy=False)

    def _tell_at(self, address: str, message: Message) -> None:
        self._reach(address, lambda: self._tell(self._link_to(address), message))

    # -- what is received ----------------------------------------------------------------------------------------------
    def _begin(self, fetch: Fetch, pages: dict[Block, int]) -> None:
        pushed = not fetch.address
        wait = self._push_timeout if pushed or fetch.follows else self._timeout
        until = time.monotonic() + wait
        receiving = Receiving(fetch.request_id, fetch.transfer, pages, dict(pages), dict(pages), until)
        self._receivings[fetch.request_id] = receiving
        self._by_transfer[fetch.transfer] = receiving
        self._over.pop(fetch.transfer, None)
        if pushed:
            receiving.offered = set()
            for link, ready in self._early.pop(fetch.transfer, ()):
                self._ready(link, ready)
        else:
            receiving.offered = set() if fetch.follows else None
            self._reach(fetch.address, lambda: self._pull(receiving, fetch.address))

    def _pull(self, receiving: Receiving, address: str) -> None:
        """The engine that has the pages can be connected to."""
        if self._receivings.get(receiving.request_id) is receiving:
            receiving.link = self._link_to(address)
            if receiving.offered is not None:
                return self._tell(receiving.link, Follow(receiving.transfer))
            return self._ask(receiving)
        return None

    def _ready(self, link: Link, ready: Ready) -> None:
        receiving = self._by_transfer.get(ready.transfer)
        if receiving is None:
            if ready.transfer in self._over:
                return self._tell(link, Done(ready.transfer))
            return _keep(self._early, ready.transfer, link, ready)
        receiving.link = link
        if ready.identity != self.identity or receiving.offered is None:
            self.counts["refused"] += 1
            log.warning("pages of %s are of %s: they are computed", receiving.request_id, OTHERS)
            return self._end(receiving)
        if ready.anew:
            receiving.question = next(self._questions)
            receiving.missing = dict(receiving.pages)
            receiving.unasked = dict(receiving.pages)
            receiving.early.clear()
            receiving.parts.clear()
        receiving.last |= ready.last
        if ready.part != WHOLE:
            self._ask_part(receiving, ready)
        else:
            receiving.offered.update(_each(ready.blocks))
        self._expect(receiving)
        return self._ask(receiving)

    def _ask_part(self, receiving: Receiving, ready: Ready) -> None:
        """Ask for what is there of a layer, of the blocks that are wanted."""
        bit = 1 << ready.part
        for table, first, count in ready.blocks:
            slices = self._parts.get(table, ())
            if not 0 <= ready.part < len(slices):
                raise ValueError(f"table {table} has {len(slices)} parts, and part {ready.part} is offered")
            blocks = [(table, block) for _, block in _each([(table, first, count)])]
            wanted = [block for block in blocks if block in receiving.missing and not receiving.parts[block] & bit]
            most = max(1, WINDOW_BYTES // (slices[ready.part].stop - slices[ready.part].start))
            receiving.question = receiving.question or next(self._questions)
            receiving.early.update((block, ready.part) for block in wanted)
            for start in range(0, len(wanted), most):
                asked = _ranges(wanted[start : start + most])
                assert receiving.link is not None
                want = Want(receiving.transfer, receiving.question, self.identity, asked, ready.part)
                self._tell(receiving.link, want)

    def _expect(self, receiving: Receiving) -> None:
        """From now on: frames that are asked for, or word of what is computed next."""
        waits = receiving.offered is not None and not receiving.last and not receiving.early
        receiving.deadline = time.monotonic() + (self._push_timeout if waits else self._timeout)

    def _ask(self, receiving: Receiving) -> None:
        """Ask for more, as far as the window lets; end what is complete, or cannot become so."""
        if receiving.early or (not receiving.last and receiving.offered is not None):
            return None  # the rest is asked for when it is known what that is, and whether it stands
        if not receiving.missing:
            return self._end(receiving)
        open_ = len(receiving.missing) - len(receiving.unasked)
        room = max(1, WINDOW_BYTES // self._pool.shape[1]) - open_
        offered = receiving.offered
        ripe = [block for block in receiving.unasked if offered is None or block in offered]
        if not ripe and not open_ and receiving.last:
            self.counts["lacking"] += 1
            return self._end(receiving)
        if not ripe or (open_ and room < max(1, min(len(ripe), WINDOW_BYTES // self._pool.shape[1] // 2))):
            return None
        asked = ripe[:room]
        for block in asked:
            del receiving.unasked[block]
        if not receiving.question:
            receiving.question = next(self._questions)
        assert receiving.link is not None
        return self._tell(receiving.link, Want(receiving.transfer, receiving.question, self.identity, _ranges(asked)))

    def _data(self, data: Data, parts: Sequence[zmq.Frame]) -> None:
        receiving = self._by_transfer.get(data.transfer)
        if receiving is None or receiving.question != data.question:
            self.counts["late"] += 1
            return None
        blocks = list(_each(data.blocks))
        early = [(block, data.part) for block in blocks] if data.part != WHOLE else []
        if any(block not in receiving.missing for block in blocks) or not receiving.early.issuperset(early):
            self.counts["doubled"] += 1
            return None
        if data.number and data.number != receiving.next_number:
            self.counts["reordered"] += 1
        receiving.next_number = data.number + 1
        right = len(set(blocks)) == len(blocks) and data.checksum == self._checksum(one.buffer for one in parts)
        if not (right and (self._fill_part if early else self._fill)(receiving, data, blocks, parts)):
            self.counts["damaged"] += 1
            receiving.early.difference_update(early)
            return self._ask(receiving) if early else self._again(receiving, blocks)
        receiving.early.difference_update(early)
        self._expect(receiving)
        return self._ask(receiving)

    def _fill(self, receiving: Receiving, data: Data, blocks: list[Block], parts: Sequence[zmq.Frame]) -> bool:
        """Write these blocks' pages, which are missing; False where the parts do not hold them."""
        size = self._pool.shape[1]
        if sum(len(one.buffer) for one in parts) != size * len(blocks) or any(len(one.buffer) % size for one in parts):
            return False
        at = iter(blocks)
        for one in parts:
            rows = np.frombuffer(one.buffer, np.uint8).reshape(-1, size)
            for row in rows:
                self._pool[receiving.missing.pop(next(at))] = row
        return True

    def _fill_part(self, receiving: Receiving, data: Data, blocks: list[Block], parts: Sequence[zmq.Frame]) -> bool:
        """One layer's. We send those of one table in one part; others may send several."""
        of_table = {table: self._parts[table][data.part] for table, _ in blocks}
        size = {table: bytes_.stop - bytes_.start for table, bytes_ in of_table.items()}
        if sum(len(one.buffer) for one in parts) != sum(size[table] for table, _ in blocks):
            return False
        rows = [np.frombuffer(one.buffer, np.uint8) for one in parts]
        content, start = rows[0] if len(rows) == 1 else np.concatenate(rows), 0
        for table, several in itertools.groupby(blocks, lambda block: block[0]):
            pages = [receiving.missing[block] for block in several]
            end = start + size[table] * len(pages)
            self._pool[pages, of_table[table]] = content[start:end].reshape(len(pages), -1)
            start = end
        for block in blocks:
            receiving.parts[block] |= 1 << data.part
            if receiving.parts[block] == (1 << len(self._parts[block[0]])) - 1:
                del receiving.missing[block]
                receiving.unasked.pop(block, None)
        return True

    def _again(self, receiving: Receiving, blocks: Iterable[Block]) -> None:
        """Ask for these once more, if it may be."""
        receiving.retries += 1
        if receiving.retries > MOST_RETRIES or receiving.link is None:
            return self._end(receiving)
        for block in blocks:
            if block in receiving.missing:
                receiving.unasked[block] = receiving.missing[block]
        return self._ask(receiving)

    def _look_at_time(self) -> None:
        now = time.monotonic()
        for receiving in [one for one in self._receivings.values() if one.deadline <= now]:
            self.counts["lost"] += 1
            waits = receiving.offered is not None and not receiving.last and not receiving.early
            if receiving.question and not waits:  # what of its answers still comes is late
                receiving.question = next(self._questions)
                receiving.early.clear()
                self._expect(receiving)
                self._again(receiving, list(receiving.missing))
            else:
                self._end(receiving)

    def _cancel(self, request_id: str) -> None:
        if (receiving := self._receivings.get(request_id)) is not None:
            self._end(receiving)

    def _end(self, receiving: Receiving) -> None:
        """Nothing of it is written any more; what is missing has failed."""
        del self._receivings[receiving.request_id]
        if self._by_transfer.get(receiving.transfer) is receiving:
            del self._by_transfer[receiving.transfer]
        self._remember(receiving.transfer)
        if receiving.link is not None:
            self._tell(receiving.link, Done(receiving.transfer))
        with self._lock:
            self._fetched.append(receiving.request_id)
            self._failed += receiving.missing.values()

    def _remember(self, transfer: str) -> None:
        """It is over: what still comes of it comes too late."""
        self._over[transfer] = None
        while len(self._over) > MOST_REMEMBERED:
            self._over.popitem(last=False)

    # -- connections ---------------------------------------------------------------------------------------------------
    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.rcvhwm = MOST_WAITING
        made.sndhwm = MOST_UNSENT
        made.ipv6 = True
        made.linger = 0
        made.maxmsgsize = max(MOST_PART_BYTES, self._pool.shape[1])
        made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MILLISECONDS)
        if self._secret_key is not None:
            secret = self._secret_key.encode()
            made.curve_secretkey = secret
            made.curve_publickey = zmq.curve_public(secret)
        return made

    def _reach(self, address: str, then: Callable[[], None]) -> None:
        """Do something once it is known where an address is. Names are looked up by a thread of their own each: the
        library would keep all transfers waiting meanwhile. What cannot be found is not reached."""
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        if address in self._places or _is_number(host):
            return then()

        def found(number: str) -> None:
            self._places[address] = f"tcp://{number}:{port}"
            then()

        waiting = self._sought.setdefault(host, [])
        waiting.append(found)
        if len(waiting) == 1:
            threading.Thread(target=self._look_up, args=(host,), name="kv-tcp-names", daemon=True).start()
        return None

    def _look_up(self, host: str) -> None:
        """In a thread of its own."""
        number = ""
        with contextlib.suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            family, _, _, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)
            number = f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])

        def tell() -> None:
            for reach in self._sought.pop(host):
                if number:
                    self._guarded(partial(reach, number))
            if not number:
                self.counts["unreachable"] += 1
                log.warning("the name %s of another engine cannot be looked up", host)

        self._do(tell)

    def _link_to(self, address: str) -> Link:
        if (link := self._links.get(address)) is None:
            made = self._socket(zmq.DEALER)
            if self._secret_key is not None:
                made.curve_serverkey = zmq.curve_public(self._secret_key.encode())
            monitor = made.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
            try:
                made.connect(self._places.get(address, address))
            except zmq.ZMQError:  # it is no address
                made.disable_monitor()
                monitor.close(linger=0)
                made.close(linger=0)
                raise
            link = self._links[address] = Link(made, address=address, monitor=monitor)
            self._poller.register(made, zmq.POLLIN)
            self._poller.register(monitor, zmq.POLLIN)
        return link

    def _over_with(self, link: Link) -> None:
        """The other engine does not take connections, or has ended one: what was to come from it does not come."""
        assert link.monitor is not None
        recv_monitor_message(link.monitor, zmq.NOBLOCK)
        self._drop(link)
        for receiving in [one for one in self._receivings.values() if one.link is link]:
            self.counts["lost"] += 1
            receiving.link = None
            self._end(receiving)

    def _drop(self, link: Link) -> None:
        del self._links[link.address]
        self._places.pop(link.address, None)
        assert link.monitor is not None
        with contextlib.suppress(KeyError):
            self._poller.unregister(link.socket)
            self._poller.unregister(link.monitor)
        link.socket.disable_monitor()
        link.monitor.close(linger=0)
        link.socket.close(linger=0)


def _keep(early: OrderedDict[str, list[tuple[Link, T]]], transfer: str, link: Link, message: T) -> None:
    """For when there is something to do with it."""
    kept = early.setdefault(transfer, [])
    kept.append((link, message))
    del kept[:-MOST_REMEMBERED]
    while len(early) > MOST_REMEMBERED:
        early.popitem(last=False)


def _is_number(host: str) -> bool:
    """Whether it is an address as it stands, which nobody has to look up."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host.strip("[]")))
    return False


def _by_block(several: Iterable[TablePages]) -> dict[Block, int]:
    return {(one.table, one.first + i): page for one in several for i, page in enumerate(one.pages.tolist())}


def _each(blocks: Blocks) -> Iterator[Block]:
    """One by one. Raises ValueError for more than any pool has, or fewer than none."""
    if sum(abs(count) for _, _, count in blocks) > MOST_BLOCKS:
        raise ValueError(f"{len(blocks)} ranges name more than {MOST_BLOCKS} blocks")
    for table, first, count in blocks:
        for block in range(first, first + count):
            yield table, block


def _ranges(blocks: Iterable[Block]) -> Blocks:
    """The same blocks in the same order, those in a row together."""
    found: list[list[int]] = []
    for table, block in blocks:
        if found and found[-1][0] == table and found[-1][1] + found[-1][2] == block:
            found[-1][2] += 1
        else:
            found.append([table, block, 1])
    return [(table, first, count) for table, first, count in found]


def _runs(pages: dict[Block, int], blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """(first page, count) of pages that lie in a row, in the order of the blocks."""
    found: list[list[int]] = []
    for block in blocks:
        page = pages[block]
        if found and found[-1][0] + found[-1][1] == page:
            found[-1][1] += 1
        else:
            found.append([page, 1])
    return [(first, count) for first, count in found]
