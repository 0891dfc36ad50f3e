"""From engine to engine: one computes a prompt and holds its pages, another goes on from them."""

from __future__ import annotations

import gc
import os
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engine.interfaces.kv_connector import KVConnectorWorker, Pages
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.kv_connector.pair import TROUBLES, Pair, Trouble
from engine_sdk.conformance.kv_connector.store import SECONDS, TOKENS, Asked, Store

PAGES = 24
"""Of the pools; nobody owns page 0."""
SHARED_MEMORY = Path("/dev/shm")
OPEN_FILES = Path("/proc/self/fd")


class PeerTests(Conformance):
    """Every page that arrives is right, on each rank; every load and every hold ends, and is told once."""

    # -- the driver --------------------------------------------------------------------------------------------------
    @classmethod
    def ends(cls) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """Options of two engines: of the one that computes, and of the one that goes on. Called for each pair anew. An
        author overrides it where engines take pages from each other; what does not come has to be given up within a
        second or two. None: they do not."""
        return None

    @classmethod
    def push(cls, name: str, receiver: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """`kv_transfer` of a request whose pages are pushed as they are computed: for the engine that computes, and for
        the one that goes on. None: nothing is pushed.

        name: of the transfer. receiver: the second one's options.
        """
        return None

    @classmethod
    def disturb(cls, workers: Sequence[KVConnectorWorker], trouble: Trouble) -> bool:
        """Let frames of pages that these send be in trouble from now on, see `pair.Disturbance`. An author overrides
        it; False: not known."""
        return False

    @classmethod
    def engine(
        cls, options: Mapping[str, Any] | None, ranks: int = 1, identity: bytes | None = None, page_bytes: int = 64
    ) -> Store:
        """Both halves of one engine. options: None: those of the class; identity: None: one that nobody else has."""
        raise NotImplementedError

    @classmethod
    @contextmanager
    def pair(cls, ranks: int = 1, identities: Sequence[bytes] | None = None) -> Iterator[Pair]:
        """Two engines, of one identity unless it is said otherwise. They are closed at the end."""
        if (options := cls.ends()) is None:
            not_served("it takes no pages from other engines")
        holds, takes = identities or [uuid.uuid4().bytes] * 2
        holder = cls.engine(options[0], ranks, holds)
        try:
            taker = cls.engine(options[1], ranks, takes)
        except BaseException:
            holder.close()
            raise
        pair = Pair(holder, taker, options[1])
        try:
            pair.taker.scribble(range(PAGES))
            yield pair
        finally:
            for engine in pair.living:
                engine.close()

    @classmethod
    def dies(cls, pair: Pair, engine: Store) -> None:
        """One of two ends without a word."""
        pair.living.remove(engine)
        engine.close()

    # -- pulls -------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_another_engine_goes_on(self, ranks: int) -> None:
        """From all blocks, and from those that it does not have itself; then nothing is held any more, and no other
        page was written to."""
        with self.pair(ranks) as pair:
            for number, (theirs, first, ours) in enumerate(
                (([1, 2, 9, 3, 20], 0, [5, 11, 7, 8]), ([4, 9, 8], 1, [3]), ([5], 0, []), ([22, 21], 0, [12]))
            ):
                asked = Asked(f"p{number}", len(theirs) - 1, kv_transfer={"do_remote_decode": True})
                if not ours:
                    continue  # of less than a block nothing is handed over
                kept, params = pair.prefilled(asked, theirs)
                before = pair.taker.content(range(PAGES))
                request = Asked(f"d{number}", len(theirs) - 1, kv_transfer=params)
                pair.makes_room(request, ours, first)
                pair.until_loaded(request)
                assert not pair.taker.failed, "pages are told as failed, and nothing has happened to them"
                pair.compare(ours, kept, first)
                for was, there in zip(before, pair.taker.content(range(PAGES)), strict=True):
                    others = [page for page in range(PAGES) if page not in ours]
                    assert torch.equal(was[others], there[others]), "a page is written to that nobody named"
                pair.until_sent(asked)
                pair.taker.core.finished(request, [Pages(0, 0, np.array([*range(1, first + 1), *ours], np.int32))])
            for _ in range(3):
                pair.until(lambda: True, "")
            assert len(pair.holder.sent) == len(set(pair.holder.sent)) == 3

    def test_what_another_engine_does_not_need(self) -> None:
        """Its own cache has all of it; or it hears of the request, and ends before there are pages: nothing is held."""
        with self.pair() as pair:
            asked = Asked("p", 2, kv_transfer={"do_remote_decode": True})
            _, params = pair.prefilled(asked, [1, 2, 3])
            request = Asked("d", 2, kv_transfer=params)
            places = [Pages(0, 0, np.array([4, 5], np.int32))]
            pair.taker.core.computed(request, places, 2 * TOKENS)
            pair.taker.core.finished(request, places)
            pair.until_sent(asked)
            asked = Asked("q", 2, kv_transfer={"do_remote_decode": True})
            _, params = pair.prefilled(asked, [1, 2, 3])
            assert pair.finds(Asked("e", 2, kv_transfer=params)) is not None
            pair.taker.core.aborted("e")
            pair.until_sent(asked)

    def test_nothing_is_held_for_nobody(self) -> None:
        """A request whose `kv_transfer` asks for nothing leaves nothing, and finds nothing."""
        with self.pair() as pair:
            alone = Asked("alone", 2)
            pair.computes(alone, [1, 2, 3])
            assert pair.holder.core.finished(alone, [Pages(0, 0, np.array([1, 2, 3], np.int32))]).seconds == 0
            assert pair.finds(Asked("other", 2)) is None

    def test_another_model_of_another_engine(self) -> None:
        """Pages of another identity are not found, or told as failed; and they are held for nobody."""
        with self.pair(identities=(b"one", b"another")) as pair:
            asked = Asked("p", 2, kv_transfer={"do_remote_decode": True})
            _, params = pair.prefilled(asked, [1, 2, 3])
            request = Asked("d", 2, kv_transfer=params)
            if (found := pair.finds(request)) is not None:
                assert found.asynchronous
                places = [Pages(0, 0, np.array([4, 5], np.int32))]
                pair.taker.core.allocated(request, places, 0, 2 * TOKENS)
                pair.until_loaded(request)
                assert pair.taker.failed >= {4, 5}, "pages of another model are taken"
            else:
                pair.taker.core.finished(request, [])
            pair.until_sent(asked)

    # -- pushes ------------------------------------------------------------------------------------------------------
    def _pushed(self, pair: Pair, name: str, blocks: int) -> tuple[Asked, Asked]:
        """The request of the engine that computes, and of the one that goes on."""
        if (params := self.push(name, pair.receiver)) is None:
            not_served("it pushes nothing")
        computing, going_on = params
        return Asked(f"p {name}", blocks, kv_transfer=computing), Asked(f"d {name}", blocks, kv_transfer=going_on)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_pages_are_pushed(self, ranks: int) -> None:
        """Chunk by chunk, into room that was made before, and into room that is made when all is computed."""
        with self.pair(ranks) as pair:
            theirs, ours = [1, 2, 9, 3, 20], [5, 11, 7, 8]
            for early in (True, False):
                asked, request = self._pushed(pair, f"early {early}", 4)
                if early:
                    pair.makes_room(request, ours)
                    pair.taker.step()
                for first, last in ((0, 2), (2, 3), (3, 5)):
                    pair.computes(asked, theirs[first:last], first)
                kept = pair.holder.content(theirs)
                pair.finishes(asked, theirs)
                if not early:
                    pair.makes_room(request, ours)
                pair.until_loaded(request)
                assert not pair.taker.failed, "pages are told as failed, and nothing has happened to them"
                pair.compare(ours, kept)
                pair.until_sent(asked)

    @pytest.mark.parametrize("who", ["computes", "goes on"])
    def test_aborts_of_pushes(self, who: str) -> None:
        """Between two chunks, on either side: the load ends, and what is held is given back."""
        with self.pair() as pair:
            theirs, ours = [1, 2, 9, 3], [5, 11, 7]
            asked, request = self._pushed(pair, who, 3)
            pair.makes_room(request, ours)
            pair.taker.step()
            kept = pair.computes(asked, theirs[:1])
            if who == "computes":
                pair.holder.core.aborted(asked.request_id)
                pair.holder.step(overwrites=theirs)
                pair.until_loaded(request)
                pair.compare(ours[:1], kept)
                assert pair.taker.failed >= {11, 7}, "what was never computed has arrived"
                return
            pair.taker.core.aborted(request.request_id)
            pair.until_loaded(request)
            self._leave_alone(pair, ours)
            pair.computes(asked, theirs[1:], 1)
            if pair.holder.core.finished(asked, [Pages(0, 0, np.array(theirs, np.int32))]).seconds:
                pair.until_sent(asked)
            self._leave_alone(pair, ours)

    def _leave_alone(self, pair: Pair, pages: Sequence[int]) -> None:
        """Nobody writes to these pages of the taker."""
        pair.taker.scribble(pages)
        before = pair.taker.content(pages)
        for _ in range(10):
            for engine in pair.living:
                engine.step()
            time.sleep(0.002)
        for was, there in zip(before, pair.taker.content(pages), strict=True):
            assert torch.equal(was, there), "pages are written to after their load has ended"

    # -- faults ------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("when", ["before its plan", "before it is asked", "on the way"])
    def test_aborts_of_who_goes_on(self, when: str) -> None:
        """The end of the load is told, nothing is written after it, and the other engine holds nothing."""
        with self.pair() as pair:
            asked = Asked("p", 4, kv_transfer={"do_remote_decode": True})
            _, params = pair.prefilled(asked, [1, 2, 9, 3, 20])
            request, ours = Asked("d", 4, kv_transfer=params), [5, 11, 7, 8]
            pair.makes_room(request, ours)
            for _ in range({"before its plan": 0, "before it is asked": 1, "on the way": 3}[when]):
                pair.taker.step()
                if when == "on the way":
                    pair.holder.step()
            pair.taker.core.aborted("d")
            pair.until_loaded(request)
            self._leave_alone(pair, ours)
            pair.until_sent(asked)
            again = Asked("p2", 4, kv_transfer={"do_remote_decode": True})
            kept, params = pair.prefilled(again, [1, 2, 9, 3, 20])
            request = Asked("d", 4, kv_transfer=params)  # the name of one that was aborted
            pair.taker.loaded.clear()
            pair.taker.failed.clear()
            pair.makes_room(request, ours)
            pair.until_loaded(request)
            assert not pair.taker.failed
            pair.compare(ours, kept)

    @pytest.mark.parametrize("when", ["before it is asked", "on the way"])
    def test_a_hold_that_runs_out(self, when: str) -> None:
        """What is overwritten then is not taken for the prompt's; the load ends; nothing is told of the hold."""
        with self.pair() as pair:
            for turn in range(5):
                theirs, ours = [1, 2, 9, 3, 20], [5, 11, 7, 8]
                asked = Asked(f"p{turn}", 4, kv_transfer={"do_remote_decode": True})
                kept, params = pair.prefilled(asked, theirs)
                request = Asked(f"d{turn}", 4, kv_transfer=params)
                pair.taker.failed.clear()
                pair.makes_room(request, ours)
                if when == "on the way":
                    pair.taker.step()
                    time.sleep(0.0005 * turn)
                gone = asked.request_id in pair.holder.sent
                pair.holder.core.aborted(asked.request_id)
                pair.holder.step(overwrites=theirs)
                pair.until_loaded(request)
                pair.compare(ours, kept)
                for _ in range(3):
                    pair.holder.step()
                told = pair.holder.sent.count(asked.request_id)
                assert told == gone, "the end of a hold is told that has run out"

    @pytest.mark.parametrize("who", ["computes", "goes on"])
    @pytest.mark.parametrize("when", ["before it is asked", "on the way"])
    def test_the_other_engine_dies(self, who: str, when: str) -> None:
        """The load ends with what has come; what is held goes back when its time is over; neither is told twice."""
        with self.pair() as pair:
            theirs, ours = [1, 2, 9, 3, 20], [5, 11, 7, 8]
            asked = Asked("p", 4, kv_transfer={"do_remote_decode": True})
            kept, params = pair.prefilled(asked, theirs)
            request = Asked("d", 4, kv_transfer=params)
            pair.makes_room(request, ours)
            if when == "on the way":
                pair.taker.step()
            if who == "goes on":
                self.dies(pair, pair.taker)
                for _ in range(10):
                    pair.holder.step()
                pair.holder.core.aborted("p")
                pair.holder.step(overwrites=theirs)
                pair.holder.step()
                assert pair.holder.sent.count("p") <= 1
                return
            self.dies(pair, pair.holder)
            pair.until_loaded(request)
            pair.compare(ours, kept)
            later = Asked("e", 4, kv_transfer={**params})
            if pair.finds(later) is not None:
                pair.makes_room(later, [12, 13, 14, 15])
                pair.until_loaded(later)
                assert pair.taker.failed >= {12, 13, 14, 15}, "pages of an engine that is gone have come"

    @pytest.mark.parametrize("trouble", TROUBLES)
    def test_frames_in_trouble(self, trouble: Trouble) -> None:
        """No wrong byte: what does not come right is asked for again, or told as failed."""
        with self.pair() as pair:
            if not self.disturb(pair.holder.workers, trouble):
                pytest.skip("the suite does not know how frames of this driver are sent: override disturb(workers)")
            theirs, ours = [1, 2, 9, 3, 20], [5, 11, 7, 8]
            for turn in range(3):
                asked = Asked(f"p{turn}", 4, kv_transfer={"do_remote_decode": True})
                kept, params = pair.prefilled(asked, theirs)
                request = Asked(f"d{turn}", 4, kv_transfer=params)
                pair.taker.failed.clear()
                pair.makes_room(request, ours)
                pair.until_loaded(request)
                pair.compare(ours, kept)
                pair.until_sent(asked)
                self._leave_alone(pair, ours)

    # -- everything at once ------------------------------------------------------------------------------------------
    def test_any_sequence_between_engines(self) -> None:
        """Prompts are computed, handed over, wanted no more and given back in any order, on both sides."""

        class Machine(_Handovers):
            opened = self.pair

        run_state_machine_as_test(Machine, settings=self.hypothesis_settings(20, stateful_step_count=25))

    def test_nothing_is_left_between_engines(self) -> None:
        """When both have ended in the midst of a transfer: no thread, no open file, no shared memory."""
        self._one_transfer()  # what is made once for the process stays
        before = belongings()
        for _ in range(2):
            self._one_transfer()
        check_belongings(before)

    def _one_transfer(self) -> None:
        with self.pair() as pair:
            asked = Asked("p", 4, kv_transfer={"do_remote_decode": True})
            _, params = pair.prefilled(asked, [1, 2, 9, 3, 20])
            pair.makes_room(Asked("d", 4, kv_transfer=params), [5, 11, 7, 8])
            pair.taker.step()
        gc.collect()


class _Handovers(RuleBasedStateMachine):
    """What is held, what is on its way, and what all the taker's other pages hold.

    When a transfer ends is not in the test's hands: each rule draws the same numbers whatever is there, and may find
    nothing to do.
    """

    opened: Any

    def __init__(self) -> None:
        super().__init__()
        self.context = self.opened()
        self.pair: Pair = self.context.__enter__()
        self.number = 0
        self.free = [set(range(1, PAGES)), set(range(1, PAGES))]
        self.held: dict[str, list[int]] = {}  # the holder's pages
        self.told: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {}  # that nobody has asked for
        self.loads: dict[str, tuple[list[int], list[torch.Tensor]]] = {}
        self.dropped: set[str] = set()  # loads that were aborted
        self.there = self.pair.taker.content(range(PAGES))

    def take(self, side: int, count: int) -> list[int]:
        """Pages of one engine."""
        pages = sorted(self.free[side])[-count:]
        self.free[side] -= set(pages)
        return pages

    @rule(blocks=st.integers(1, 3))
    def compute(self, blocks: int) -> None:
        """A prompt."""
        if len(self.free[0]) < blocks + 1:
            return
        self.number += 1
        name, pages = f"p{self.number}", self.take(0, blocks + 1)
        request = Asked(name, blocks, name=name, kv_transfer={"do_remote_decode": True})
        kept, params = self.pair.prefilled(request, pages)
        self.held[name] = pages
        self.told[name] = params, kept

    @rule(which=st.integers(0, 9))
    def ask(self, which: int) -> None:
        """The other engine makes room."""
        if (name := _chosen(self.told, which)) is None or len(self.free[1]) < 3:
            return
        params, kept = self.told.pop(name)
        request = Asked(f"of {name}", kept[0].shape[0] - 1, name=name, kv_transfer=params)
        pages = self.take(1, request.blocks)
        self.pair.makes_room(request, pages)
        self.loads[request.request_id] = pages, kept

    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        """A request that waits for its pages."""
        if (name := _chosen(self.loads.keys() - self.dropped, which)) is not None:
            self.dropped.add(name)
            self.pair.taker.core.aborted(name)

    @rule(which=st.integers(0, 9))
    def run_out(self, which: int) -> None:
        """A hold's time is over, and the pages are others' at once."""
        if (name := _chosen(self.held, which)) is not None:
            self.expire(name)

    def expire(self, name: str) -> None:
        """This hold's."""
        pages = self.held.pop(name)
        self.pair.holder.core.aborted(name)
        self.pair.holder.step(overwrites=pages)
        self.hear()
        self.free[0].update(pages)

    @rule()
    def holder_steps(self) -> None:
        """And hears what is wanted no more."""
        self.pair.holder.step()
        self.hear()

    def hear(self) -> None:
        """Pages that are held no more are others' at once."""
        for name in self.pair.holder.sent:
            if name in self.held:
                pages = self.held.pop(name)
                self.pair.holder.scribble(pages)
                self.free[0].update(pages)
        assert len(set(self.pair.holder.sent)) == len(self.pair.holder.sent), "the end of a hold is told twice"

    @rule()
    def taker_steps(self) -> None:
        """And hears which loads have ended."""
        self.pair.taker.step()
        loaded, self.pair.taker.loaded = self.pair.taker.loaded, []
        for request_id in loaded:
            assert request_id in self.loads, f"the end of the load of {request_id!r} is told twice"
            pages, kept = self.loads.pop(request_id)
            if request_id not in self.dropped:
                self.pair.compare(pages, kept)
            self.pair.taker.failed -= set(pages)
            self.pair.taker.scribble(pages)
            for rank, there in enumerate(self.pair.taker.content(pages)):
                self.there[rank][pages] = there
            self.free[1].update(pages)

    @rule()
    def nothing_happens(self) -> None:
        """For a moment."""
        time.sleep(0.001)

    @invariant()
    def sound(self) -> None:
        """No page is written to that no load has."""
        others = sorted(set(range(PAGES)) - {page for pages, _ in self.loads.values() for page in pages})
        for was, there in zip(self.there, self.pair.taker.content(others), strict=True):
            assert torch.equal(was[others], there), "a page is written to that no load has"

    def teardown(self) -> None:
        """Everything ends."""
        try:
            for name in sorted(self.told.keys() & self.held.keys()):
                self.expire(name)
            deadline = time.monotonic() + SECONDS
            while self.loads or self.held:
                assert time.monotonic() < deadline, f"loads {[*self.loads]} and holds {[*self.held]} never end"
                self.holder_steps()
                self.taker_steps()
                time.sleep(0.001)
        finally:
            self.context.__exit__(None, None, None)


def _chosen(names: Collection[str], which: int) -> str | None:
    """One of these; None where there is none."""
    return sorted(names)[which % len(names)] if names else None


def belongings() -> dict[str, set[str]]:
    """Threads, shared memory and open files of this process."""
    shared = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
    files: set[str] = set()
    for entry in os.listdir(OPEN_FILES) if OPEN_FILES.is_dir() else ():
        try:
            files.add(f"{entry} {os.readlink(OPEN_FILES / entry)}")
        except OSError:
            continue  # the folder's own
    return {
        "threads": {f"{thread.name} {thread.ident}" for thread in threading.enumerate()},
        "shared memory": shared,
        "open files": files,
    }


def check_belongings(before: Mapping[str, set[str]]) -> None:
    """Nothing but what was there before is left."""
    left = {kind: sorted(found - before[kind]) for kind, found in belongings().items() if found - before[kind]}
    assert not left, f"left behind: {left}"
