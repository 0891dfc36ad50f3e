"""The same promise as `test_schedules`, with hypothesis in the driver's seat: it adds, aborts and steps as it likes."""

from __future__ import annotations

import random

from cores import LAYOUTS, HandClock, make_core, mismatches
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Outcome, Planned, Settings, examples
from toy_store import Shelf, ToyOptions, ToyScheduler

from engine.types.params import SamplingParams
from engine.types.retention import KVRetention

TOYS = (
    ToyOptions(),
    ToyOptions(loss=0.2, later=0.3),
    ToyOptions(asynchronous=1.0, delay=8),
    ToyOptions(asynchronous=0.5, delay=3, loss=0.1, later=0.1),
)
"""Stores that the core may have."""
WISHES = (
    KVRetention(ttl=12, session="s"),
    KVRetention(ttl=30, priority=3, key="a"),
    KVRetention(pin=True),
    KVRetention(ttl=8, tokens=8),
    KVRetention(release=True),
    KVRetention(release=True, session="s"),
)
"""What requests may say of their pages."""


class Core(RuleBasedStateMachine):
    """An engine core whose cache is too small for all."""

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        num_pages=st.integers(8, 30),
        in_flight=st.sampled_from([2, 1, 3]),
        budget=st.sampled_from([16, 5, 1]),
        swap_pages=st.sampled_from([0, 6, 200]),
        failing_loads=st.sampled_from([0.0, 0.0, 0.3]),
        threshold=st.sampled_from([0, 3]),
        toy=st.sampled_from([None, *TOYS]),
        canary=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        layout: str,
        num_pages: int,
        in_flight: int,
        budget: int,
        swap_pages: int,
        failing_loads: float,
        threshold: int,
        toy: ToyOptions | None,
        canary: bool,
        seed: int,
    ) -> None:
        chosen = Settings(
            num_pages=num_pages,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=32,
            in_flight=in_flight,
            enable_prefix_caching=True,
            swap_pages=swap_pages,
            failing_loads=failing_loads,
            long_prefill_token_threshold=threshold,
            toy=toy,
            canary=canary,
        )
        self.lossy = bool(failing_loads or (toy is not None and toy.loss))
        ToyScheduler.shelf = Shelf()
        self.clock = HandClock()
        self.core, self.executor = make_core(LAYOUTS[layout], chosen, clock=self.clock)
        self.rng = random.Random(seed)
        self.shared = [self.rng.randrange(VOCAB) for _ in range(16)]
        self.requests: dict[str, Planned] = {}
        self.outcomes: dict[str, Outcome] = {}

    @rule(
        cut=st.sampled_from([0, 8, 16]),
        tail=st.integers(1, 12),
        n=st.sampled_from([1, 1, 3]),
        timeout=st.sampled_from([None, None, None, 5, 20]),
        wish=st.sampled_from([None, None, *WISHES]),
    )
    def add(self, cut: int, tail: int, n: int, timeout: int | None, wish: KVRetention | None) -> None:
        name = f"r{len(self.requests)}"
        prompt = (*self.shared[:cut], *(self.rng.randrange(VOCAB) for _ in range(tail)))
        for k in range(n):
            planned = Planned(
                request_id=f"{name}-{k}",
                prompt=prompt,
                params=SamplingParams(temperature=0, max_tokens=self.rng.randint(1, 16), seed=0),
                eos=(0,),
                parent=name if n > 1 else None,
                timeout=timeout,
                retention=() if wish is None else (wish,),
            )
            self.requests[planned.request_id] = planned
            self.outcomes[planned.request_id] = Outcome()
            self.core.add_request(planned.to_request())

    @rule(which=st.integers(0, 2**16), n=st.sampled_from([1, 1, 1, 50]))
    def abort(self, which: int, n: int) -> None:
        names = sorted(self.requests)[which % (len(self.requests) or 1) :][:n]
        for name in names:
            if self.outcomes[name].finish_reason is None:
                self.requests[name] = Planned(**{**vars(self.requests[name]), "aborted": 0})
        self.core.abort(names)

    @rule(n=st.integers(1, 8))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.clock.sleep(1)
            for output in self.core.step().outputs:
                self.outcomes[output.request_id].take(output)
            self.core.check_integrity()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if not self.core.has_work():
                break
            self.step(1)
        assert not self.core.has_work()
        for name, planned in self.requests.items():
            assert self.outcomes[name].finish_reason is not None, name
            check_outcome(self.core, planned, self.outcomes[name])
        if not self.lossy:
            assert not mismatches(self.core), "the canary is alarmed by what is right"
        stats = self.core.stats()
        assert stats.pages_used == stats.num_running == stats.num_waiting == 0


TestCore = Core.TestCase
TestCore.settings = hypothesis_settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
