"""The suite of point `kv_connector`: both halves together, against copies of all that was swapped."""

from __future__ import annotations

import gc
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.interfaces.kv_connector import (
    LATER,
    KVConnectorCard,
    KVConnectorNeed,
    KVConnectorScheduler,
    KVConnectorWorker,
    PagedPool,
    Pages,
)
from engine.plugin import POINTS
from engine.types.errors import EngineError
from engine.types.kv import MARK_BYTES
from engine.types.parallel import Parallel, Place
from engine_sdk.conformance.base import Importer, check_methods, methods_of, not_served
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.core_contexts import core_context, one_layer
from engine_sdk.conformance.kv_connector.host_pages import HostPages
from engine_sdk.conformance.kv_connector.peers import PAGES, PeerTests, belongings, check_belongings
from engine_sdk.conformance.kv_connector.store import TOKENS, Asked, Store, two_layers
from engine_sdk.conformance.kv_connector.tier import Tier
from engine_sdk.conformance.timing import median_seconds

PLACES = 12
"""Pages for which there is swap space."""
PAGE_BYTES = (24, 64, 4096, 12_352)
HALVES = {"core": "KVConnectorScheduler", "worker": "KVConnectorWorker"}


class KVConnectorConformance(PeerTests):
    """Pages come back byte by byte, whatever happened in between; what has no room is refused; nothing is left."""

    point = "kv_connector"
    protocol = "KVConnectorScheduler"

    @classmethod
    def need(cls, page_bytes: int = 64, places: int = PLACES, tp: int = 1, framework: str = "torch") -> KVConnectorNeed:
        """What is asked for."""
        return KVConnectorNeed(
            page_bytes=page_bytes,
            swap_space=page_bytes * places,
            parallel=Parallel(tp=tp),
            device=cls.device,
            framework=framework,
        )

    @classmethod
    def needs(cls) -> Sequence[KVConnectorNeed]:
        return [cls.need(), cls.need(12_352, 1000, 8)]

    @classmethod
    def impossible(cls) -> Sequence[KVConnectorNeed]:
        any_framework = cast("type[KVConnectorCard]", cls.subject().card).framework is None
        return [] if any_framework else [cls.need(framework="abacus")]

    # -- the driver --------------------------------------------------------------------------------------------------
    @classmethod
    def body(cls) -> type:
        """The scheduler half; see `half`."""
        return cls.half("core")

    @classmethod
    def half(cls, name: str) -> type:
        """The class of one half: "core" or "worker"."""
        return cls.subject().body(name)

    @classmethod
    def workers(cls, pools: Sequence[torch.Tensor], places: int, framework: str = "torch") -> list[KVConnectorWorker]:
        """The worker half on each rank, registered with its pool. A few bytes of the space are left over."""
        page_bytes, ranks = pools[0].shape[1], len(pools)
        start: dict[str, Any] = {
            "layout": one_layer(page_bytes), "swap_space": places * page_bytes + 7,
            "parallel": Parallel(tp=ranks),
        }  # fmt: skip
        found = []
        for rank, pool in enumerate(pools):
            context = worker_context(cls.subject(), cls.device, with_ops=False, place=Place(rank=rank), **start)
            worker: KVConnectorWorker = cls.half("worker")(context)
            worker.register(cls.registered(pool, framework))
            found.append(worker)
        return found

    @classmethod
    def pool(cls, pages: int, page_bytes: int, framework: str = "torch") -> torch.Tensor:
        """A rank's; where the platform's framework is not torch's it lies in host memory, as `HostPages` needs."""
        device = cls.device if framework == "torch" else "cpu"
        return torch.zeros(pages, page_bytes, dtype=torch.uint8, device=device)

    @classmethod
    def registered(cls, pool: torch.Tensor, framework: str) -> torch.Tensor | PagedPool:
        """The pool, as a worker half gets it from a platform of this framework."""
        return pool if framework == "torch" else HostPages(pool.numpy())

    @classmethod
    def make(
        cls, page_bytes: int = 64, places: int = PLACES, ranks: int = 1, pages: int = PAGES, framework: str = "torch"
    ) -> Tier:
        """Both halves, the second on each rank, in the order in which an engine builds them."""
        if not cast("type[KVConnectorCard]", cls.subject().card).swaps:
            not_served("the card's swaps is False")
        cls.require(cls.need(page_bytes, places, ranks, framework))
        pools = [cls.pool(pages, page_bytes, framework) for _ in range(ranks)]
        workers, space = cls.workers(pools, places, framework), places * page_bytes + 7
        context = replace(core_context(cls.subject(), pages), layout=one_layer(page_bytes), swap_space=space)
        tier = Tier(cls.half("core")(context), workers, pools)
        for pool in pools:
            tier.scribble(pool)
        return tier

    @classmethod
    def lose(cls, workers: Sequence[KVConnectorWorker]) -> bool:
        """Make all that these keep unreadable, so that loads of it fail. An author overrides it; False: not known."""
        return False

    # -- the halves --------------------------------------------------------------------------------------------------
    def test_body_has_the_interface(self) -> None:
        """Each method of both halves is there and takes the interface's arguments."""
        module = sys.modules[POINTS[self.point].interface.partition(":")[0]]
        for half, protocol in HALVES.items():
            check_methods(self.half(half), getattr(module, protocol), methods_of(getattr(module, protocol)))

    def test_the_scheduler_half_is_light(self, fresh_import: Importer) -> None:
        """It never sees a tensor: importing it brings no torch."""
        interface = POINTS[self.point].interface.partition(":")[0]
        found = fresh_import(self.subject().card.bodies["core"], interface)
        assert not found["heavy"], f"importing the scheduler half brings {', '.join(found['heavy'])}"

    # -- bytes -------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("page_bytes", PAGE_BYTES)
    def test_round_trip(self, page_bytes: int) -> None:
        """Pages in a row and scattered ones, back into others, while requests between them come and go."""
        tier = self.make(page_bytes)
        for turn, pages in enumerate(([1, 2, 3, 4], [9, 4, 17, 2, 11], [23], [5, 6, 1, 2])):
            assert tier.swap_out(f"request-{turn}", pages)
            assert tier.swap_out("between", [7, 8, 12])
            tier.step()
            tier.forget("between")
            tier.step()
            tier.swap_in(f"request-{turn}", range(len(pages)), [page % (PAGES - 1) + 1 for page in pages])
            tier.step()

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8"])
    def test_every_dtype(self, dtype: str) -> None:
        """Bytes are bytes: numbers that are none, infinities, negative zeros and denormals come back as they were."""
        tier, kind = self.make(), getattr(torch, dtype)
        numbers = torch.zeros(tier.pools[0].numel() // kind.itemsize, dtype=kind)
        if kind.is_floating_point:
            least = torch.finfo(kind).smallest_normal / 2
            special = torch.tensor([torch.nan, -torch.inf, torch.inf, -0.0, least, torch.finfo(kind).max], dtype=kind)
            numbers[: len(special) * (len(numbers) // len(special))] = special.repeat(len(numbers) // len(special))
        else:
            numbers.copy_(torch.arange(len(numbers)) % 251 - 125)
        tier.pools[0].copy_(numbers.view(torch.uint8).view(tier.pools[0].shape))
        assert tier.swap_out("a", [3, 4, 9])
        tier.step()
        tier.swap_in("a", range(3), [9, 1, 2])
        tier.step()

    def test_the_order_of_pages(self) -> None:
        """The i-th page that went out is place i, however the pages are numbered."""
        tier = self.make()
        assert tier.swap_out("a", [9, 3, 20, 1]) and tier.swap_out("b", [2, 8])
        tier.step()
        tier.swap_in("a", [0, 1, 2, 3], [4, 22, 5, 21])
        tier.swap_in("b", [0, 1], [8, 2])
        tier.step()

    @pytest.mark.parametrize("places", [[], [0], [4], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]], ids=str)
    def test_partial_loads(self, places: list[int]) -> None:
        """Some places come back; the others are forgotten with them, and their room is free again."""
        tier = self.make()
        for turn in range(4):
            assert tier.swap_out("a", [7, 9, 8, 20, 3])
            tier.step()
            tier.swap_in("a", places, list(range(10 + turn, 10 + turn + len(places))))
            tier.step()
        assert tier.core.usage().used == 0

    def test_pages_that_two_requests_share(self) -> None:
        """Each keeps a copy of its own."""
        tier = self.make()
        assert tier.swap_out("a", [1, 2, 3]) and tier.swap_out("b", [2, 3, 4])
        tier.step()
        tier.forget("a")
        tier.swap_in("b", [0, 1, 2], [1, 2, 3])
        tier.step()

    def test_out_before_in(self) -> None:
        """In one plan: what leaves a page is what it held before something came into it."""
        tier = self.make()
        assert tier.swap_out("a", [1, 2, 3])
        tier.step()
        assert tier.swap_out("b", [3, 4, 5])
        tier.swap_in("a", [0, 1, 2], [4, 5, 3])
        tier.step()
        tier.swap_in("b", [0, 1, 2], [1, 2, 3])
        tier.step()

    def test_every_rank_keeps_its_own(self) -> None:
        """One scheduler half, the same plans, other bytes on each rank."""
        tier = self.make(ranks=3)
        assert tier.swap_out("a", [1, 2, 3]) and tier.swap_out("b", [9, 8])
        tier.step()
        tier.swap_in("b", [1], [5])
        tier.step()
        tier.swap_in("a", [0, 2], [3, 1])
        tier.step()

    def test_pages_of_another_framework(self) -> None:
        """The pool is no tensor: pages go out before others come in, in any order and in part, with steps in flight."""
        tier = self.make(framework="jax")
        assert tier.swap_out("a", [9, 3, 20, 1]) and tier.swap_out("b", [2, 8])
        tier.step()
        assert tier.swap_out("c", [4, 5, 2])
        tier.swap_in("a", [0, 2, 3], [4, 22, 5])
        tier.plan()
        tier.run()
        tier.swap_in("c", [0, 2], [8, 6])
        tier.swap_in("b", [1], [7])
        tier.plan()
        tier.run()
        tier.drain()

    # -- room --------------------------------------------------------------------------------------------------------
    def test_a_full_tier(self) -> None:
        """All pages of a request or none: a refusal keeps nothing, harms nobody, and ends when there is room."""
        tier = self.make()
        total = tier.core.usage().total
        assert 0 < total <= PLACES, f"room for {total} pages, in a space for {PLACES}"
        assert tier.swap_out("first", range(1, total))
        tier.step()
        assert not tier.swap_out("large", [1, 2]), "more pages are kept than there is room for"
        assert tier.core.usage() == (total - 1, total)
        assert tier.swap_out("small", [3])
        assert not tier.swap_out("another", [4])
        tier.step()
        assert tier.plan().section is None, "a refused request is copied"
        tier.drain()
        tier.forget("first")
        tier.step()
        assert tier.swap_out("large", [1, 2])
        tier.step()
        tier.swap_in("small", [0], [7])
        tier.swap_in("large", [0, 1], [8, 9])
        tier.step()
        assert not tier.swap_out("beyond", range(1, total + 2)), "more pages are kept than there is room for"

    def test_room_comes_back(self) -> None:
        """After hundreds of requests, whichever way they end."""
        tier = self.make()
        total = tier.core.usage().total
        for turn in range(200):
            assert tier.swap_out("a", range(1, total + 1)), f"the room is not given back: turn {turn}"
            if turn % 3:
                tier.step()
            if turn % 2:
                tier.swap_in("a", [turn % total], [turn % 20 + 1])
            else:
                tier.forget("a")
            tier.step()
        assert tier.core.usage() == (0, total)

    def test_a_place_is_not_given_out_while_a_plan_reads_it(self) -> None:
        """A full tier: in the plan that brings a request back, another wants its room."""
        tier = self.make()
        total = tier.core.usage().total
        assert tier.swap_out("a", range(1, total + 1))
        tier.step()
        for turn in range(8):
            mine, other = ("a", "b") if turn % 2 == 0 else ("b", "a")
            tier.swap_in(mine, range(total), range(2, total + 2))
            if not tier.swap_out(other, range(1, total + 1)):
                tier.step()
                assert tier.swap_out(other, range(1, total + 1))
            tier.step()

    def test_nothing_to_do(self) -> None:
        """No bytes for a plan that moves nothing; decisions are handed over once."""
        tier = self.make()
        assert tier.core.plan_section() is None
        assert tier.swap_out("a", [1])
        assert tier.plan().section is not None
        assert tier.core.plan_section() is None
        tier.drain()

    # -- aborts ------------------------------------------------------------------------------------------------------
    def test_aborts(self) -> None:
        """A request ends before its plan is made, while plans are on their way, and after them; its name comes back."""
        tier = self.make()
        total = tier.core.usage().total
        assert tier.swap_out("a", [1, 2, 3]) and tier.swap_out("b", [4, 5])
        tier.forget("a")
        tier.step()
        assert tier.swap_out("a", [6, 7, 8])
        tier.plan()
        tier.forget("a")  # the plan that takes it out has not run
        assert tier.swap_out("a", [9])
        tier.plan()
        tier.drain()
        tier.swap_in("a", [0], [20])
        tier.swap_in("b", [0, 1], [21, 22])
        tier.step()
        assert tier.core.usage() == (0, total)
        assert tier.swap_out("a", range(1, total + 1))
        tier.forget("a")
        tier.step()
        assert tier.swap_out("a", range(1, total + 1)), "the room of a request that ended at once is lost"
        tier.step()

    # -- results -----------------------------------------------------------------------------------------------------
    def test_results_of_steps_in_flight(self) -> None:
        """Each step's own, taken after later steps began."""
        tier = self.make()
        for name, page in (("a", 1), ("b", 2), ("c", 3)):
            assert tier.swap_out(name, [page, page + 10])
        tier.step()
        for name, page in (("a", 4), ("b", 5), ("c", 6)):
            tier.swap_in(name, [0, 1], [page, page + 10])
            tier.plan()
            tier.run()
        tier.drain()

    def test_failed_loads(self) -> None:
        """What cannot be read is reported page by page, by that step, on every rank; the others are right, and what is
        swapped later too."""
        tier = self.make(ranks=2)
        assert tier.swap_out("a", [1, 2, 3])
        tier.step()
        self._lose(tier)
        assert tier.swap_out("b", [7, 8])
        tier.step()
        tier.swap_in("a", [0, 2], [11, 9])
        tier.swap_in("b", [0, 1], [12, 4])
        tier.step()
        assert tier.swap_out("a", [1, 2, 3])
        tier.step()
        tier.swap_in("a", [0, 1, 2], [3, 4, 5])
        tier.step()
        assert tier.core.usage().used == 0

    @pytest.mark.parametrize("lost", ["a", "b", "c", "ab", "ac", "bc", "abc"])
    def test_every_failed_load_is_reported(self, lost: str) -> None:
        """Of one step that brings three requests back: whichever are lost, from the first page to the last."""
        tier = self.make()
        pages = {"a": [1], "b": [5, 4, 3], "c": [8, 7, 6, 9]}
        for name in lost:
            assert tier.swap_out(name, pages[name])
        tier.step()
        self._lose(tier)
        for name in sorted(pages.keys() - {*lost}):
            assert tier.swap_out(name, pages[name])
        tier.step()
        for name, first in (("a", 10), ("b", 20), ("c", 11)):
            count = len(pages[name])
            tier.swap_in(name, range(count), range(first, first + count))
        tier.step()

    def _lose(self, tier: Tier) -> None:
        if not self.lose(tier.workers):
            pytest.skip("the suite does not know how loads of this driver fail: override lose(workers)")
        tier.lost()

    def test_memory_that_is_not_there(self) -> None:
        """Space that nobody has: a typed error at the start, or memory that is taken as it is needed."""
        if not cast("type[KVConnectorCard]", self.subject().card).swaps:
            not_served("the card's swaps is False")
        self.require(self.need(4096, 2**45))
        pool = self.pool(PAGES, 4096)
        try:
            (worker,) = self.workers([pool], 2**45)
        except EngineError as error:
            assert "swap" in str(error) or "space" in str(error), f"the error does not say what is too large: {error}"
            return
        assert callable(worker.load)

    # -- stores ------------------------------------------------------------------------------------------------------
    finds_by_key: ClassVar[bool] = True
    """Whether blocks are found by their keys alone. An author overrides it where the request has to say more."""

    @classmethod
    def store(
        cls, ranks: int = 1, identity: bytes | None = None, page_bytes: int = 64, framework: str = "torch"
    ) -> Store:
        """Both halves of a connector that stores. identity: None: one that no other test has had."""
        card = cast("type[KVConnectorCard]", cls.subject().card)
        if not card.stores or not cls.finds_by_key:
            not_served("the card's stores is False" if not card.stores else "it finds nothing by keys alone")
        return cls.engine(None, ranks, identity, page_bytes, framework)

    @classmethod
    def engine(
        cls,
        options: Mapping[str, Any] | None,
        ranks: int = 1,
        identity: bytes | None = None,
        page_bytes: int = 64,
        framework: str = "torch",
    ) -> Store:
        cls.require(cls.need(page_bytes, tp=ranks, framework=framework))
        card = cast("type[KVConnectorCard]", cls.subject().card)
        mark_bytes = MARK_BYTES if card.layerwise and card.moves_marks else 0
        layout, parallel, space = two_layers(page_bytes, mark_bytes), Parallel(tp=ranks), page_bytes * PLACES
        pools, workers = [cls.pool(PAGES, page_bytes, framework) for _ in range(ranks)], []
        subject = cls.subject() if options is None else cls.subject().with_options(options)
        core: KVConnectorScheduler = cls.half("core")(
            replace(
                core_context(subject, PAGES),
                layout=layout,
                swap_space=space,
                identity=identity or uuid.uuid4().bytes,
                parallel=parallel,
            )
        )
        for rank, pool in enumerate(pools):
            start: dict[str, Any] = {"layout": layout, "swap_space": space, "parallel": parallel}
            context = worker_context(subject, cls.device, with_ops=False, place=Place(rank=rank), **start)
            workers.append(cls.half("worker")(context))
            workers[-1].register(cls.registered(pool, framework))
        return Store(core, workers, pools, card.layerwise, mark_bytes)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_what_was_computed_is_found(self, ranks: int) -> None:
        """Byte by byte on each rank, after others have overwritten the pages; beyond what the device has, too."""
        store = self.store(ranks)
        try:
            kept = store.save(Asked("a", 4), [1, 2, 9, 3])
            found = store.find(Asked("b", 4), 4)
            store.bring(Asked("b", 4), found, [5, 11, 7, 8], 0, kept)
            found = store.find(Asked("c", 4), 2, num_local=2 * TOKENS)
            store.bring(Asked("c", 4), found, [3, 1], 2, [of_rank[2:] for of_rank in kept])
            assert not store.failed
        finally:
            store.close()

    def test_blocks_of_another_framework(self) -> None:
        """The pool is no tensor: blocks are stored and found, and what is lost is told."""
        store = self.store(framework="jax")
        try:
            kept = store.save(Asked("a", 3), [1, 9, 2])
            store.bring(Asked("b", 3), store.find(Asked("b", 3), 3), [5, 11, 7], 0, kept)
            assert not store.failed, "pages are told as failed, and nothing has happened to them"
            found = store.find(Asked("c", 3), 3)
            if self.lose(store.workers):
                store.failed.add(0)  # losses are looked for
                store.bring(Asked("c", 3), found, [6, 4, 3], 0, kept)
                assert store.failed & {3, 4, 6}, "what is lost is not told"
        finally:
            store.close()

    def test_what_nobody_has_computed_is_not_found(self) -> None:
        """Nothing for other blocks, and of a request that goes on otherwise the part that is there."""
        store = self.store()
        try:
            store.save(Asked("a", 2, name="part"), [1, 2])
            store.find(Asked("b", 2, name="part"), 2)
            assert store.answer(Asked("c", 3, name="other")) is None
            store.find(Asked("d", 4, name="part"), 2)
        finally:
            store.close()

    def test_another_model_is_not_found(self) -> None:
        """What was saved under one identity is nothing to another."""
        store, other = self.store(), self.store()
        try:
            store.save(Asked("a", 2), [1, 2])
            store.find(Asked("b", 2), 2)
            deadline = time.monotonic() + 1
            while (found := other.core.lookup(Asked("c", 2), 0)) == LATER and time.monotonic() < deadline:
                other.step()
            assert found is None or found == LATER, f"pages of another model are found: {found}"
        finally:
            store.close()
            other.close()

    def test_a_store_that_lost_what_it_had(self) -> None:
        """Each page that is not told as failed is right."""
        store = self.store()
        try:
            kept = store.save(Asked("a", 3), [1, 2, 3])
            request = Asked("b", 3)
            found = store.find(request, 3)
            if not self.lose(store.workers):
                pytest.skip("the suite does not know how loads of this driver fail: override lose(workers)")
            store.failed.add(0)  # losses are looked for
            store.bring(request, found, [7, 5, 6], 0, kept)
            assert store.failed & {5, 6, 7}, "what is lost is not told"
        finally:
            store.close()

    def test_aborts_of_loads(self) -> None:
        """Before anything is allocated, and while pages travel, whose end is told; and of a request nobody knows."""
        store = self.store()
        try:
            store.core.aborted("nobody")
            kept = store.save(Asked("a", 3), [1, 2, 3])
            found = store.find(Asked("b", 3), 3)
            store.core.aborted("b")
            store.step()
            request = Asked("c", 3)
            found = store.find(request, 3)
            places = [Pages(0, 0, np.array([4, 5, 6], np.int32))]
            store.core.allocated(request, places, 0, 3 * TOKENS)
            store.core.aborted("c")
            if found.asynchronous:
                store.until_loaded("c")
            else:
                store.step()
            under_way = Asked("e", 3)
            found = store.find(under_way, 3)
            store.core.allocated(under_way, [Pages(0, 0, np.array([4, 5, 6], np.int32))], 0, 3 * TOKENS)
            store.step()
            if found.asynchronous and "e" not in store.loaded:
                store.core.aborted("e")
                store.until_loaded("e")
            store.scribble([4, 5, 6])
            before = store.content([4, 5, 6])
            for _ in range(5):
                store.step()
            for was, there in zip(before, store.content([4, 5, 6]), strict=True):
                assert torch.equal(was, there), "pages of an aborted request are written to after its load has ended"
            store.bring(Asked("d", 3), store.find(Asked("d", 3), 3), [7, 8, 9], 0, kept)
        finally:
            store.close()

    # -- everything at once ------------------------------------------------------------------------------------------
    def test_any_sequence_of_calls(self) -> None:
        """Requests go, come back in part, get lost, and end in any order, with plans in flight."""
        make, lose = self.make, self.lose

        class Machine(_ConnectorCalls):
            def make(self) -> Tier:
                return make(ranks=2)

            def lose(self) -> bool:
                return lose(self.tier.workers)

        run_state_machine_as_test(Machine, settings=self.hypothesis_settings(60, stateful_step_count=40))

    def test_nothing_is_left(self) -> None:
        """When the halves are let go with pages kept: no thread, no open file, no shared memory."""
        self._once_round()  # what is made once for the process stays
        before = belongings()
        for _ in range(3):
            self._once_round()
        check_belongings(before)

    def _once_round(self) -> None:
        tier = self.make()
        assert tier.swap_out("a", [1, 2, 3]) and tier.swap_out("b", [4])
        tier.step()
        tier.swap_in("b", [0], [5])
        tier.step()
        del tier
        gc.collect()

    @classmethod
    def figure(cls) -> str | None:
        """How fast pages go out and come back."""
        pages, page_bytes = 64, 256 << 10
        tier = cls.make(page_bytes, pages, pages=pages + 1)
        ids, places = np.arange(1, pages + 1, dtype=np.int32), np.arange(pages, dtype=np.int32)

        def turn() -> None:
            assert tier.core.swap_out("a", ids)
            out = tier.core.plan_section()
            tier.core.swap_in("a", places, ids)
            back = tier.core.plan_section()
            assert out is not None and back is not None
            for step, section in enumerate((out, back)):
                tier.workers[0].begin(step, section)
                tier.workers[0].load(step)
                tier.workers[0].end(step)

        seconds = median_seconds(turn, cls.device)
        moved = 2 * pages * page_bytes
        return f"{pages} pages of 256 KiB out and back: {seconds * 1e3:,.1f} ms, {moved / seconds / 1e9:.1f} GB/s"


class _ConnectorCalls(RuleBasedStateMachine):
    """The core's side: which requests are kept, what is planned, what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.make()
        self.number = 0

    def make(self) -> Tier:
        """New halves."""
        raise NotImplementedError

    def lose(self) -> bool:
        """Make all that is kept unreadable; False where nobody knows how."""
        raise NotImplementedError

    @precondition(lambda self: self.tier.running)
    @rule()
    def everything_is_lost(self) -> None:
        """What the steps have taken out by now."""
        if self.lose():
            self.tier.lost()

    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        """Any pages, often in a row."""
        start, count = data.draw(st.integers(1, PAGES - 6)), data.draw(st.integers(1, 6))
        row = list(range(start, start + count))
        pages = data.draw(
            st.one_of(st.just(row), st.lists(st.integers(1, PAGES - 1), min_size=1, max_size=6, unique=True))
        )
        self.number += 1
        self.tier.swap_out(f"request-{self.number}", pages)

    @precondition(lambda self: self.tier.kept)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        """Any of its places, into any pages that this plan does not fill already."""
        name = data.draw(st.sampled_from(sorted(self.tier.kept)))
        free = [page for page in range(1, PAGES) if page not in self.tier.targets]
        most = min(len(free), self.tier.kept[name].pages.size)
        places = sorted(data.draw(st.sets(st.integers(0, self.tier.kept[name].pages.size - 1), max_size=most)))
        pages = data.draw(st.permutations(free))[: len(places)]
        self.tier.swap_in(name, places, pages)

    @precondition(lambda self: self.tier.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """An end, at any time."""
        self.tier.forget(data.draw(st.sampled_from(sorted(self.tier.kept))))

    @precondition(lambda self: self.tier.planned < 3)
    @rule()
    def plan(self) -> None:
        """The next step's."""
        self.tier.plan()

    @precondition(lambda self: self.tier.planned)
    @rule()
    def run(self) -> None:
        """The oldest plan."""
        self.tier.run()

    @precondition(lambda self: self.tier.running)
    @rule()
    def take(self) -> None:
        """The oldest step's result."""
        self.tier.take()

    @invariant()
    def sound(self) -> None:
        """It says so itself."""
        self.tier.core.check_integrity()

    def teardown(self) -> None:
        """What is on its way arrives."""
        self.tier.drain()
