"""Pages between two ranks' ends over loopback, and everything that may happen to a frame."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import zmq
from loopback import free_port

from engine.types.errors import ConfigError
from engine_connectors.tcp.exchange import MOST_PART_BYTES, Exchange, Receiving
from engine_connectors.tcp.messages import WHOLE, Data, ExchangeNews, Fetch, Lacking, Offer, Ready, TablePages, Want

PAGES, SIZE = 64, 4096
IDENTITY = b"the same"


class Ends:
    """Two ends: `p` has pages that hold their numbers, those of `d` hold nothing."""

    def __init__(self, key: str | None = None, timeout: float = 5.0, size: int = SIZE, pages: int = PAGES) -> None:
        self.addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        rng = np.random.default_rng(0)
        self.full = rng.integers(0, 256, (pages, size), np.uint8)
        self.empty = np.zeros((pages, size), np.uint8)
        self.key = key
        self.timeout = timeout
        self.p = self.end(0, self.full)
        self.d = self.end(1, self.empty)

    def end(self, i: int, pool: np.ndarray, key: str | None = None) -> Exchange:
        timeout, size = self.timeout, pool.shape[1]
        made = Exchange(
            pool,
            i,
            self.addresses[i],
            secret_key=key or self.key,
            timeout=timeout,
            push_timeout=2 * timeout,
            parts={0: [slice(0, size // 4), slice(size // 4, size)]},
        )
        made.identity = IDENTITY
        return made

    def hasty(self) -> None:
        """What does not come is given up soon."""
        self.d._timeout = 0.3
        self.d._push_timeout = 0.6

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def tables(first: int, *pages: int, table: int = 0) -> list[TablePages]:
    return [TablePages(table, first, np.array(pages, np.int32))]


def wait(end: Exchange, *, fetched: int = 0, sent: int = 0, seconds: float = 10) -> ExchangeNews:
    """What it tells, put together, until so much has ended."""
    whole, until = ExchangeNews(rank=end._rank), time.monotonic() + seconds
    while len(whole.fetched) < fetched or len(whole.sent) < sent:
        assert time.monotonic() < until, (whole, end.counts)
        if (news := end.news()) is None:
            time.sleep(0.002)
            continue
        whole = ExchangeNews(
            rank=news.rank,
            fetched=whole.fetched + news.fetched,
            failed=whole.failed + news.failed,
            sent=whole.sent + news.sent,
        )
    return whole


def pull(ends: Ends, count: int = 40) -> tuple[ExchangeNews, list[int], list[int]]:
    """Pull pages 1, 3, 5 ... and what lies behind them into pages from the end on; news, and both lists of pages."""
    theirs = [*range(1, count, 2), *range(2, count, 2)]
    ours = [PAGES - 1 - i for i in range(len(theirs))]
    ends.p.offer(Offer("t", tables(5, *theirs)))
    ends.d.fetch(Fetch("r", "t", tables(5, *ours), ends.addresses[0]))
    return wait(ends.d, fetched=1), theirs, ours


def faulty(end: Exchange, change) -> None:
    """Let what an end tells pass `change(message, parts)`, which returns what is told in its place."""
    tell = end._tell

    def instead(link, message, parts=()):
        for one in change(message, list(parts)):
            tell(link, *one)

    end._tell = instead


@pytest.mark.parametrize("frame", [1, SIZE, 1 << 20])
def test_pages_are_pulled(ends, frame, monkeypatch):
    monkeypatch.setattr("engine_connectors.tcp.exchange.FRAME_BYTES", frame)
    monkeypatch.setattr("engine_connectors.tcp.exchange.WINDOW_BYTES", 8 * SIZE)
    news, theirs, ours = pull(ends)
    assert (news.fetched, news.failed) == (["r"], [])
    assert (ends.empty[ours] == ends.full[theirs]).all()
    assert not ends.empty[: PAGES - len(ours)].any(), "another page was written"
    assert wait(ends.p, sent=1).sent == ["t"]
    assert not ends.p.counts and not ends.d.counts


def test_two_tables_and_a_part_of_what_is_there(ends):
    ends.p.offer(Offer("t", tables(0, 1, 2, 3, 4) + tables(2, 5, 6, table=1)))
    ends.d.fetch(Fetch("r", "t", tables(1, 10, 11, 12) + tables(3, 13, table=1), ends.addresses[0]))
    assert wait(ends.d, fetched=1).failed == []
    assert (ends.empty[[10, 11, 12, 13]] == ends.full[[2, 3, 4, 6]]).all()


def test_pages_are_pushed_as_they_come(ends):
    ends.d.fetch(Fetch("r", "t", tables(0, 9, 8, 7, 6)))
    ends.p.offer(Offer("t", tables(0, 1), ends.addresses[1], last=False))
    ends.p.offer(Offer("t", tables(1, 2, 3), ends.addresses[1], last=False))
    ends.p.offer(Offer("t", tables(3, 4, 5), ends.addresses[1], last=True))
    assert wait(ends.d, fetched=1).failed == []
    assert (ends.empty[[9, 8, 7, 6]] == ends.full[[1, 2, 3, 4]]).all()
    assert wait(ends.p, sent=1).sent == ["t"]


def stage(ends: Ends, address: str, first: int, *pages: int) -> None:
    """A step computes these pages, layer by layer, for transfer "t"."""
    chunk = Offer("t", tables(first, *pages), address, last=False)
    assert ends.p.reserve("t", len(pages) * SIZE)
    for part, its in enumerate(ends.p._parts[0]):
        ends.p.stage(chunk, 0, part, first, ends.full[list(pages), its])


def whole_frames(ends: Ends) -> list[int]:
    """How many pages go as a whole, as they are sent."""
    sent: list[int] = []

    def change(message, parts):
        if isinstance(message, Data) and message.part == WHOLE:
            sent.append(sum(count for _, _, count in message.blocks))
        return [(message, parts)]

    faulty(ends.p, change)
    return sent


def until(true) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("way", ["pushed", "followed", "followed late"])
def test_layers_are_there_before_the_prompt_is_computed(ends, way):
    whole, address = whole_frames(ends), ends.addresses[1] if way == "pushed" else ""
    ours = [9, 8, 7, 6, 5]
    fetch = Fetch("r", "t", tables(0, *ours), "" if address else ends.addresses[0], follows=not address)
    if way != "followed late":
        ends.d.fetch(fetch)
    stage(ends, address, 0, 1, 2)
    stage(ends, address, 2, 3)
    ends.full[[1, 2, 3]] ^= 255  # the request has lost its pages
    if way == "followed late":
        ends.d.fetch(fetch)
    until(lambda: (ends.empty[[9, 8, 7]] == ends.full[[1, 2, 3]] ^ 255).all())
    news = ends.d.news()  # counts, perhaps: on a busy machine a block is asked for twice
    assert news is None or not (news.fetched or news.failed), "it has ended before what is computed stands"
    ends.p.offer(Offer("t", tables(0, 11, 12, 13, 4, 14), address))
    assert wait(ends.d, fetched=1).failed == []
    assert (ends.empty[[6, 5]] == ends.full[[4, 14]]).all()
    assert sum(whole) == 2, "what was there has been sent again"
    assert wait(ends.p, sent=1).sent == ["t"]
    assert ends.p._reserved == 0


@pytest.mark.parametrize("late", [False, True])
def test_what_does_not_stand_is_read_anew(ends, late):
    """By who followed from the start, and by who asks when it stands."""
    fetch = Fetch("r", "t", tables(0, 9, 8), ends.addresses[0], follows=True)
    if not late:
        ends.d.fetch(fetch)
    stage(ends, "", 0, 1, 2)
    if not late:
        until(lambda: (ends.empty[[9, 8]] == ends.full[[1, 2]]).all())
    ends.p.offer(Offer("t", tables(0, 3, 4), anew=True))
    if late:
        ends.d.fetch(fetch)
    assert wait(ends.d, fetched=1).failed == []
    assert (ends.empty[[9, 8]] == ends.full[[3, 4]]).all()


@pytest.mark.parametrize("what", ["lost", "damaged"])
def test_layers_that_do_not_come_are_read_when_all_is_computed(ends, what):
    def change(message, parts):
        if not isinstance(message, Data) or message.part != 1:
            return [(message, parts)]
        return [] if what == "lost" else [(message, [bytes(len(part)) for part in parts])]

    faulty(ends.p, change)
    ends.hasty()
    ends.d.fetch(Fetch("r", "t", tables(0, 9, 8), ends.addresses[0], follows=True))
    stage(ends, "", 0, 1, 2)
    ends.p.offer(Offer("t", tables(0, 1, 2)))
    assert wait(ends.d, fetched=1).failed == []
    assert (ends.empty[[9, 8]] == ends.full[[1, 2]]).all() and ends.d.counts[what]


def receiving(end: Exchange, blocks: list[tuple[int, int]]) -> Receiving:
    """What an end waits for: part 1 of these blocks, into pages from 1 on."""
    pages = {block: page for page, block in enumerate(blocks, 1)}
    made = Receiving("r", "t", pages, dict(pages), dict(pages), time.monotonic() + 100, question=7, offered=set())
    made.early.update((block, 1) for block in pages)
    end._receivings["r"] = end._by_transfer["t"] = made
    return made


@pytest.mark.parametrize("cuts", [[], [1], [0, SIZE, SIZE + 5]], ids=["one part", "cut", "in four"])
def test_a_layer_of_several_tables_comes_in_any_parts(ends, cuts):
    half = [slice(0, SIZE // 2), slice(SIZE // 2, SIZE)]
    ends.d._parts = {0: [slice(0, SIZE // 4), slice(SIZE // 4, SIZE)], 1: half}
    waits = receiving(ends.d, [(0, 5), (0, 6), (1, 2), (0, 9)])
    bytes_ = [ends.d._parts[table][1] for table, _ in waits.pages]
    content = np.concatenate([ends.full[page, of] for page, of in enumerate(bytes_, 1)]).tobytes()
    parts = [zmq.Frame(content[i:j]) for i, j in pairwise([0, *cuts, len(content)])]
    blocks = [(0, 5, 2), (1, 2, 1), (0, 9, 1)]
    ends.d._data(Data("t", 7, 0, blocks, ends.d._checksum(one.buffer for one in parts), 1), parts)
    assert not ends.d.counts and not waits.early and set(waits.parts.values()) == {2}
    for page, of in enumerate(bytes_, 1):
        assert (ends.empty[page, of] == ends.full[page, of]).all() and not ends.empty[page, : of.start].any()


def test_frames_that_name_a_block_twice_or_cut_a_page_are_damaged(ends):
    waits = receiving(ends.d, [(0, 5), (0, 6)])
    layer, page = [zmq.Frame(bytes(2 * (SIZE - SIZE // 4)))], [zmq.Frame(bytes(n)) for n in (1, 2 * SIZE - 1)]
    for blocks, part, parts in (([(0, 5, 1), (0, 5, 1)], 1, layer), ([(0, 5, 2)], WHOLE, page)):
        ends.d._data(Data("t", 7, 0, blocks, ends.d._checksum(one.buffer for one in parts), part), parts)
    assert ends.d.counts == {"damaged": 2} and len(waits.missing) == 2 and not waits.parts.total()


def test_copies_of_what_nobody_takes_have_their_bounds(ends, monkeypatch):
    monkeypatch.setattr("engine_connectors.tcp.exchange.MOST_STAGED_BYTES", 3 * SIZE)
    stage(ends, "", 0, 1, 2)
    assert not ends.p.reserve("u", 2 * SIZE)
    ends.p.withdraw("t")
    assert ends.p.reserve("u", 2 * SIZE)


@pytest.mark.parametrize("early", [True, False])
def test_who_follows_and_wants_nothing_leaves_nothing_held(ends, early):
    if early:
        ends.d.release(ends.addresses[0], "t")
        until(lambda: "t" in ends.p._over)
        assert not ends.p.reserve("t", SIZE)
        ends.p.offer(Offer("t", tables(0, 1, 2)))
    else:
        stage(ends, "", 0, 1)
        ends.d.fetch(Fetch("r", "t", tables(0, 9), ends.addresses[0], follows=True))
        until(lambda: ends.d._receivings)
        ends.d.cancel("r")
        assert wait(ends.d, fetched=1).fetched == ["r"]
    assert wait(ends.p, sent=1).sent == ["t"]


def test_a_prompt_that_is_withdrawn_ends_who_follows(ends):
    ends.d.fetch(Fetch("r", "t", tables(0, 9), ends.addresses[0], follows=True))
    stage(ends, "", 0, 1)
    ends.p.withdraw("t")
    assert wait(ends.d, fetched=1).failed == [9]
    ends.d.fetch(Fetch("s", "t", tables(0, 9), ends.addresses[0], follows=True))
    assert wait(ends.d, fetched=1).failed == [9]


def test_a_push_waits_for_its_room_and_one_that_is_wanted_no_more_hears_so(ends):
    for name in ("t", "u"):
        ends.p.offer(Offer(name, tables(0, 1, 2), ends.addresses[1]))
    time.sleep(0.05)
    ends.d.fetch(Fetch("r", "t", tables(0, 9, 8)))
    assert wait(ends.d, fetched=1).failed == []
    ends.d.fetch(Fetch("s", "u", tables(0, 7, 6)))
    ends.d.cancel("s")
    assert wait(ends.d, fetched=1).fetched == ["s"]
    assert sorted(wait(ends.p, sent=2).sent) == ["t", "u"]


def test_a_push_that_nobody_needs_hears_so_before_and_after_it_comes(ends):
    ends.d.release("", "t")
    ends.p.offer(Offer("t", tables(0, 1, 2), ends.addresses[1]))
    ends.p.offer(Offer("u", tables(0, 1, 2), ends.addresses[1]))
    assert wait(ends.p, sent=1).sent == ["t"]
    ends.d.release("", "u")
    assert wait(ends.p, sent=1).sent == ["u"]


def test_a_push_that_is_not_all_there_or_never_begins_ends(ends):
    ends.d.fetch(Fetch("r", "t", tables(0, 9, 8)))
    ends.p.offer(Offer("t", tables(0, 1), ends.addresses[1]))
    assert wait(ends.d, fetched=1).failed == [8]
    ends.hasty()
    ends.d.fetch(Fetch("s", "v", tables(0, 9)))
    assert wait(ends.d, fetched=1).failed == [9]
    assert ends.d.counts["lost"] == 1


def test_another_identity_is_not_read(ends):
    ends.d.identity = b"another"
    news, _, ours = pull(ends)
    assert news.failed == ours and not ends.empty.any()
    ends.d.fetch(Fetch("s", "u", tables(0, 9)))
    ends.p.offer(Offer("u", tables(0, 1), ends.addresses[1]))
    assert wait(ends.d, fetched=1).failed == [9]


def test_what_is_withdrawn_or_of_another_engine_is_lacking(ends):
    ends.p.offer(Offer("t", tables(0, 1, 2)))
    ends.p.withdraw("t")
    ends.d.fetch(Fetch("r", "t", tables(0, 9, 8), ends.addresses[0]))
    assert wait(ends.d, fetched=1).failed == [9, 8]
    ends.p.engine_id = "mine"
    ends.d.fetch(Fetch("s", "theirs-1", tables(0, 9, 8), ends.addresses[0]))
    assert wait(ends.d, fetched=1).failed == [9, 8]
    assert ends.d.counts == {"lacking": 2}


def test_who_asks_before_it_is_there_gets_it_when_it_is(ends):
    ends.d.fetch(Fetch("r", "t", tables(0, 9, 8), ends.addresses[0]))
    time.sleep(0.05)
    ends.p.offer(Offer("t", tables(0, 1, 2)))
    assert wait(ends.d, fetched=1).failed == []
    assert (ends.empty[[9, 8]] == ends.full[[1, 2]]).all() and not ends.d.counts


def test_frames_that_are_doubled_or_out_of_order_are_seen_and_do_no_harm(ends, monkeypatch):
    monkeypatch.setattr("engine_connectors.tcp.exchange.FRAME_BYTES", SIZE)
    held: list[tuple] = []

    def change(message, parts):
        if not isinstance(message, Data):
            return [(message, parts)]
        held.append((message, parts))
        if len(held) < 3:
            return []
        out = held[::-1] + held[:1]
        held.clear()
        return out

    faulty(ends.p, change)
    news, theirs, ours = pull(ends, 13)
    assert news.failed == []
    assert (ends.empty[ours] == ends.full[theirs]).all()
    assert ends.d.counts["reordered"] and ends.d.counts["doubled"] + ends.d.counts["late"] >= 3


@pytest.mark.parametrize("what", ["lost", "damaged", "cut", "misnamed"])
@pytest.mark.parametrize("times", [1, 100])
def test_frames_that_are_lost_or_damaged_are_asked_for_again_and_then_given_up(ends, monkeypatch, what, times):
    monkeypatch.setattr("engine_connectors.tcp.exchange.FRAME_BYTES", SIZE)
    left = [times]

    def change(message, parts):
        if not isinstance(message, Data) or message.blocks[0][1] != 7 or not left[0]:
            return [(message, parts)]
        left[0] -= 1
        if what == "lost":
            return []
        bad = bytearray(parts[0])
        bad[17] ^= 1
        if what == "cut":
            bad = bad[:-1]
        elif what == "misnamed":
            return [(message, [bytes(SIZE)])]
        return [(message, [bytes(bad)])]

    faulty(ends.p, change)
    if what == "lost":
        ends.hasty()
    news, theirs, ours = pull(ends, 13)
    if times == 1:
        assert news.failed == []
        assert (ends.empty[ours] == ends.full[theirs]).all()
    else:
        assert ours[2] in news.failed
        good = [i for i, page in enumerate(ours) if page not in news.failed]
        assert (ends.empty[np.array(ours)[good]] == ends.full[np.array(theirs)[good]]).all()
        assert not ends.empty[news.failed].any()
    assert ends.d.counts["lost" if what == "lost" else "damaged"]


def test_an_answer_to_an_earlier_question_comes_too_late(ends):
    kept = []

    def change(message, parts):
        if isinstance(message, Data) and not kept:
            kept.append((message, parts))
            return []
        return [*kept, (message, parts)]

    faulty(ends.p, change)
    ends.hasty()
    news, theirs, ours = pull(ends, 5)
    assert news.failed == []
    assert (ends.empty[ours] == ends.full[theirs]).all()
    assert ends.d.counts["late"] >= 1 and ends.d.counts["lost"] >= 1


def test_a_page_that_changes_on_its_way_is_not_taken(ends):
    def change(message, parts):
        if isinstance(message, Data):
            ends.full[1] ^= 255
        return [(message, parts)]

    faulty(ends.p, change)
    ends.p.offer(Offer("t", tables(0, 1)))
    ends.d.fetch(Fetch("r", "t", tables(0, 9), ends.addresses[0]))
    assert wait(ends.d, fetched=1).failed == [9]
    assert ends.d.counts["damaged"]


def test_the_other_end_dies_or_was_never_there(ends):
    faulty(ends.p, lambda message, parts: [])
    ends.p.offer(Offer("t", tables(0, 1, 2)))
    ends.d._timeout = 60.0
    ends.d.fetch(Fetch("r", "t", tables(0, 9, 8), ends.addresses[0]))
    time.sleep(0.1)
    ends.p.close()
    assert wait(ends.d, fetched=1).failed == [9, 8]
    ends.d.fetch(Fetch("s", "t", tables(0, 9, 8), ends.addresses[0]))
    assert wait(ends.d, fetched=1).failed == [9, 8]
    ends.p = ends.end(0, ends.full)  # another in its place
    news, theirs, ours = pull(ends)
    assert news.failed == [] and (ends.empty[ours] == ends.full[theirs]).all()


@pytest.mark.parametrize("way", ["pulled", "pushed", "followed"])
@pytest.mark.parametrize("who", ["p", "d"])
def test_an_end_that_dies_at_any_frame_harms_nobody(monkeypatch, way, who):
    """Its sockets close in the place of its first message, its second, and so on, until it has sent all."""
    monkeypatch.setattr("engine_connectors.tcp.exchange.FRAME_BYTES", SIZE)
    for last in range(20):
        ends = Ends()
        try:
            ends.d._timeout = 0.05
            ends.d._push_timeout = 0.1
            left = [last]

            def change(message, parts, left=left):
                if not left[0]:
                    raise zmq.ContextTerminated
                left[0] -= 1
                return [(message, parts)]

            faulty(getattr(ends, who), change)
            address, ours = ends.addresses[1] if way == "pushed" else "", [9, 8, 7]
            source = "" if way == "pushed" else ends.addresses[0]
            ends.d.fetch(Fetch("r", "t", tables(0, *ours), source, follows=way == "followed"))
            if way != "pulled":
                stage(ends, address, 0, 1, 2)
            ends.p.offer(Offer("t", tables(0, 1, 2, 3), address))
            if who == "p":
                failed = wait(ends.d, fetched=1).failed
                good = [i for i, page in enumerate(ours) if page not in failed]
                assert (ends.empty[[ours[i] for i in good]] == ends.full[[1 + i for i in good]]).all()
            else:
                until(lambda ends=ends, left=left: left[0] > 0 or not ends.d._thread.is_alive() or not ends.p._sendings)
                ends.p.withdraw("t")  # the hold's time is over
                assert not ends.p._sendings and ends.p._reserved == 0
            living = ends.d if who == "p" else ends.p
            until(lambda living=living: not living._commands)
            before = time.process_time()
            time.sleep(0.05)
            assert time.process_time() - before < 0.04, "a thread goes on and on"
            if left[0]:
                return
        finally:
            ends.close()
    raise AssertionError("it never came to an end")


def test_a_fetch_that_is_cancelled_writes_nothing_after_its_end(ends):
    faulty(ends.p, lambda message, parts: [time.sleep(0.05), (message, parts)][1:])
    ends.p.offer(Offer("t", tables(0, 1, 2)))
    ends.d.fetch(Fetch("r", "t", tables(0, 9, 8), ends.addresses[0]))
    ends.d.cancel("r")
    assert wait(ends.d, fetched=1).failed == [9, 8]
    assert wait(ends.p, sent=1).sent == ["t"]
    time.sleep(0.1)
    assert not ends.empty.any()


def test_what_is_no_message_is_passed_over(ends):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 1000
        stranger.connect(ends.addresses[0])
        encode = ends.d._encode
        for frames in (
            [b""],
            [b"\xc1"],
            [encode(Want("t", 1, IDENTITY, [(0, 0, 1 << 40)]))],
            [encode(Want("t", 1, IDENTITY, [(0, 0, 1 << 40), (0, 0, -(1 << 40))]))],
            [encode(Want("t", 1, IDENTITY, [(0, 0, 1 << 14)]))],
            [encode(Data("t", 1, 0, [(0, 0, -1)], 0))],
            [encode(Lacking("t", 1, []))],
            [encode(Ready("r", IDENTITY, [(9, 9, 9)], True))],
        ):
            stranger.send_multipart(frames)
        until = time.monotonic() + 10
        while ends.p.counts["unread"] < 5 and time.monotonic() < until:
            time.sleep(0.01)
    news, theirs, ours = pull(ends)
    assert news.failed == [] and (ends.empty[ours] == ends.full[theirs]).all()
    assert ends.p.counts["unread"] == 5


def test_a_part_that_is_larger_than_any_page_cuts_its_sender_off(ends):
    assert ends.p._listener.maxmsgsize == MOST_PART_BYTES
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(ends.addresses[0])
        stranger.send(bytes(MOST_PART_BYTES + 1))
        assert monitor.poll(10_000), "it is still connected"
        stranger.disable_monitor()
        monitor.close(linger=0)


def test_nothing_waits_for_a_thread_that_has_ended(ends):
    ends.d._closed = True
    ends.d._nudge()
    ends.d._thread.join(10)
    time.sleep(0.1)  # until the other end of its socket has heard
    began = time.monotonic()
    for _ in range(3000):  # more than the socket holds
        ends.d.cancel("r")
    ends.d._closed = False
    ends.d.close()
    assert time.monotonic() - began < 5


def test_an_address_that_is_none_leaves_no_sockets(ends):
    ends.hasty()
    before = len(ends.d._context._sockets)
    ends.d.fetch(Fetch("r", "t", tables(0, 9), "tcp://127.0.0.1:99999"))
    assert wait(ends.d, fetched=1).failed == [9]
    assert len([one for one in ends.d._context._sockets if not one.closed]) == before


def test_a_name_that_takes_long_to_look_up_keeps_nobody_waiting(ends, monkeypatch):
    known = threading.Event()
    look_up = socket.getaddrinfo

    def slow(host, *args, **kwargs):
        if host != "slow.example":
            return look_up(host, *args, **kwargs)
        assert known.wait(10)
        return look_up("localhost", *args, **kwargs)

    monkeypatch.setattr("engine_connectors.tcp.exchange.socket.getaddrinfo", slow)
    named = ends.addresses[0].replace("127.0.0.1", "slow.example")
    ends.p.offer(Offer("u", tables(0, 1, 2)))
    for name, transfer, pages in (("a", "u", (20, 21)), ("b", "v", (22, 23))):
        ends.d.fetch(Fetch(name, transfer, tables(0, *pages), named))
    ends.d.cancel("b")
    news, theirs, ours = pull(ends, 9)
    assert (sorted(news.fetched), sorted(news.failed)) in ((["b", "r"], [22, 23]), (["b"], [22, 23]))
    if "r" not in news.fetched:
        assert wait(ends.d, fetched=1).fetched == ["r"]
    known.set()
    assert wait(ends.d, fetched=1).fetched == ["a"]
    assert (ends.empty[[20, 21]] == ends.full[[1, 2]]).all() and (ends.empty[ours] == ends.full[theirs]).all()


def test_a_name_that_nobody_has_is_given_up(ends, monkeypatch):
    def nobody(host, *args, **kwargs):
        raise socket.gaierror(8, "no such name")

    monkeypatch.setattr("engine_connectors.tcp.exchange.socket.getaddrinfo", nobody)
    ends.hasty()
    ends.d.fetch(Fetch("s", "u", tables(0, 9), "tcp://nobody.example:1234"))
    assert wait(ends.d, fetched=1).failed == [9]
    assert ends.d.counts["unreachable"] == 1


def test_who_asks_for_more_than_it_takes_has_to_wait_and_gets_everything(monkeypatch):
    """A queue of one message: nothing is lost, and both ends of a pull in both directions go on."""
    monkeypatch.setattr("engine_connectors.tcp.exchange.MOST_WAITING", 1)
    monkeypatch.setattr("engine_connectors.tcp.exchange.FRAME_BYTES", 1 << 16)
    ends = Ends(size=1 << 16)
    try:
        for end, peer, name in ((ends.p, 1, "p"), (ends.d, 0, "d")):
            for k in range(4):
                end.offer(Offer(f"of {name} {k}", tables(0, *range(1, 31))))
                other = (ends.d, ends.p)[peer == 0]
                other.fetch(Fetch(f"{k}", f"of {name} {k}", tables(0, *range(32, 62)), ends.addresses[1 - peer]))
        for end in (ends.p, ends.d):
            assert wait(end, fetched=4).failed == []
            assert not end.counts
        assert (ends.empty[32:62] == ends.full[1:31]).all()
    finally:
        ends.close()


def test_with_a_key_nobody_without_it_is_let_in():
    keys = [zmq.curve_keypair()[1].decode() for _ in range(2)]
    ends = Ends(keys[0])
    ends.hasty()
    try:
        news, theirs, ours = pull(ends)
        assert news.failed == [] and (ends.empty[ours] == ends.full[theirs]).all()
        for key in (keys[1], None):
            ends.d.close()
            ends.key = None
            ends.d = ends.end(1, ends.empty, key)
            ends.hasty()
            ends.p.offer(Offer("u", tables(0, 1)))
            ends.d.fetch(Fetch("s", "u", tables(0, 9), ends.addresses[0]))
            assert wait(ends.d, fetched=1).failed == [9]
    finally:
        ends.close()


def test_a_port_that_is_taken_is_refused(ends):
    with pytest.raises(ConfigError, match="kv-connector.port"):
        ends.end(0, ends.full)


def test_a_rank_that_waits_for_nobody_does_not_spin(ends):
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
