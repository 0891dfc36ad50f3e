"""Schedules of arrivals and aborts, made by hypothesis, and a driver that runs one through an engine core.

Used with `paged_worker` here, and with the real runner in float64 elsewhere:

    @given(schedules(vocab=...))
    def test(schedule):
        core = ...an EngineCore with schedule.settings...
        outcomes = run_schedule(core, schedule)
        for request in schedule.requests: compare outcomes[request.request_id] with the request alone
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from hypothesis import strategies as st
from toy_store import ToyOptions

from engine.loop.engine_core import EngineCore
from engine.types.outputs import CoreOutput, TokenLogprobs
from engine.types.params import SamplingParams
from engine.types.request import EncoderInput, EngineRequest
from engine.types.retention import KVRetention


def examples(count: int) -> int:
    """So many schedules in `make test`, and EXAMPLES times as many in `make test-all`."""
    return count * int(os.environ.get("EXAMPLES", "1"))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the core: small and awkward numbers.

    Args:
        num_pages: the null page included.
        hold: whether a test executor holds results back.
        long_prefill_token_threshold: of the scheduler.
        swap_pages: of the swap tier; 0: preempted requests are computed again.
        failing_loads: the share of pages that a test worker does not load.
        drafter: its kind, "" for none; num_drafts: the most for a request; adaptive: whether that follows acceptance.
        drafts_under_masks: the grammar's matchers can roll back. jump_forward: over what they force.
        canary: pages are marked, and checked wherever they move; where there is a prefix cache.
    """

    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    in_flight: int
    enable_prefix_caching: bool
    hold: bool = True
    drafter: str = ""
    num_drafts: int = 0
    adaptive: bool = True
    long_prefill_token_threshold: int = 0
    swap_pages: int = 0
    failing_loads: float = 0.0
    drafts_under_masks: bool = True
    jump_forward: bool = False
    toy: ToyOptions | None = None
    canary: bool = False


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One request of a schedule.

    Args:
        arrives: the loop's step before which it is added.
        aborted: the step before which it is aborted, or None.
        timeout: steps that it may take, or None.
        retention: what becomes of its pages.
        encoder: what an encoder reads for it.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0
    aborted: int | None = None
    eos: tuple[int, ...] = ()
    salt: str | None = None
    parent: str | None = None
    priority: int = 0
    host_tokens: bool = False
    timeout: int | None = None
    retention: tuple[KVRetention, ...] = ()
    encoder: EncoderInput | None = None

    def to_request(self) -> EngineRequest:
        """As the core takes it."""
        return EngineRequest(
            request_id=self.request_id,
            prompt_token_ids=list(self.prompt),
            params=self.params,
            eos_token_ids=list(self.eos),
            arrival_time=float(self.arrives),
            cache_salt=self.salt,
            parent=self.parent,
            host_tokens=self.host_tokens,
            priority=self.priority,
            timeout=self.timeout,
            kv_retention=self.retention,
            encoder=self.encoder,
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Settings, and requests in the order of their arrival."""

    settings: Settings
    requests: tuple[Planned, ...]


@dataclass
class Outcome:
    """What a request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: tuple[str, str, str, str] | None = None
    completed: bool = False

    def take(self, output: CoreOutput) -> None:
        """Add one output. Nothing may follow the last."""
        assert self.finish_reason is None, f"{output} came after the end"
        self.tokens += output.new_token_ids
        self.logprobs += output.new_logprobs or []
        assert not (self.tokens and output.new_prompt_logprobs) or len(self.tokens) == len(output.new_token_ids)
        self.prompt_logprobs += output.new_prompt_logprobs or []
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)
            self.stop_reason = output.stop_reason
            self.error = output.error
            self.completed = output.completed


@st.composite
def schedules(
    draw: st.DrawFn,
    vocab: int,
    tokens_per_page: int = 4,
    max_model_len: int = 40,
    max_requests: int = 10,
    drafters: tuple[str, ...] = ("",),
    crowded: bool = False,
    encoders: bool = False,
) -> Schedule:
    """Requests whose prompts share prefixes, some with salts, some siblings, some aborted; caches from too small for
    one request to roomy; budgets from one token.

    Hypothesis draws what is worth shrinking; the rest comes from a seed, so that most examples are crowded.

    Args:
        vocab: ids are below it; id 0 is the end of sequence.
        tokens_per_page: of the KV layout, roughly: the scale for the number of pages.
        max_model_len: of the core. max_requests: siblings count as one.
        drafters: kinds to choose from.
        crowded: many requests that come early, and pages for one or two of them: most examples preempt.
        encoders: every request has an input to the encoder, one of few; a step has room for the longest.
    """
    rng = random.Random(draw(st.integers(0, 2**32)))
    most = draw(st.integers(3 if crowded else 1, max_requests))
    requests = _requests(rng, vocab, max_model_len, rng.randint((most + 1) // 2, most))
    if crowded:
        requests = tuple(_that_grows(rng, request) for request in requests)
    if encoders:
        inputs = [encoder_input([rng.randrange(9) for _ in range(rng.randint(1, 9))]) for _ in range(3)]
        requests = tuple(replace(request, encoder=rng.choice(inputs)) for request in requests)
    lengths = [min(len(r.prompt) + (r.params.max_tokens or 0), max_model_len) for r in requests]
    longest, total = max(lengths), sum(lengths)
    tight = -(-longest // tokens_per_page)
    pages = rng.choice(
        [
            rng.randint(1, tight),  # too small for some
            tight + rng.randint(0, 2),
            rng.randint(tight, 3 * tight),
            rng.randint(tight, 3 * tight),
            3 * (total // tokens_per_page + len(requests)),  # roomy
        ]
    )
    if crowded:
        pages = tight + rng.randint(0, 2)
    return Schedule(
        settings=Settings(
            num_pages=1 + pages,
            max_num_seqs=rng.randint(3, 6) if crowded else rng.randint(1, 6),
            max_num_batched_tokens=rng.choice([10, 11, 16, 33, 64] if encoders else [1, 2, 3, 5, 7, 8, 16, 33, 64]),
            max_model_len=max_model_len,
            in_flight=rng.choice([1, 2, 2, 2, 3]),
            enable_prefix_caching=rng.random() < 0.8,
            hold=rng.random() < 0.8,
            drafter=rng.choice(drafters),
            num_drafts=rng.choice([1, 2, 4, 4, 7]),
            adaptive=rng.random() < 0.5,
            jump_forward=rng.random() < 0.5,
            long_prefill_token_threshold=rng.choice([0, 0, 1, 3, 8]),
            swap_pages=rng.choice([0, 0, rng.randint(1, pages), 10 * pages]),
            canary=rng.random() < 0.5,
        ),
        requests=requests,
    )


def encoder_input(ids: list[int]) -> EncoderInput:
    """Of so many tokens; the same ids have the same key."""
    return EncoderInput(key=str(ids), num_tokens=len(ids), data=np.array(ids, np.int32))


def _requests(rng: random.Random, vocab: int, max_model_len: int, count: int) -> tuple[Planned, ...]:
    def ids(n: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(n)]

    shared = [ids(max_model_len // 2) for _ in range(2)]
    requests: list[Planned] = []
    at = 0
    for i in range(count):
        at += rng.choice([0, 0, 0, 1, 2, 9])
        prefix = rng.choice(shared)[: rng.choice([0, 5, 12, max_model_len])]
        prompt = tuple([*prefix, *ids(rng.randint(1, 14))][: max_model_len - 1])
        salt = rng.choice([None, None, None, None, "a", "b"])
        siblings = rng.choice([1, 1, 1, 3])
        for k in range(siblings):
            requests.append(
                Planned(
                    request_id=f"r{i}" if siblings == 1 else f"r{i}-{k}",
                    prompt=prompt,
                    params=_params(rng, vocab),
                    arrives=at,
                    aborted=at + rng.randint(0, 15) if rng.random() < 0.15 else None,
                    eos=(0,),
                    salt=salt,
                    parent=None if siblings == 1 else f"r{i}",
                    timeout=rng.randint(1, 40) if rng.random() < 0.1 else None,
                )
            )
    return tuple(requests)


def _that_grows(rng: random.Random, request: Planned) -> Planned:
    """The request, with a short prompt and a long output, so that it is admitted early and wants many pages later."""
    params = msgspec.structs.replace(
        request.params, max_tokens=rng.choice([12, 20, 28]), ignore_eos=True, stop_token_ids=[], min_tokens=0
    )
    prompt = request.prompt[: 9 if request.parent else rng.choice([1, 3, 9, 20])]
    return replace(request, arrives=request.arrives // 4, prompt=prompt, params=params)


def _params(rng: random.Random, vocab: int) -> SamplingParams:
    """Greedy, with all the ways to end."""
    max_tokens = rng.choice([1, 2, 7, 20, 20, 30])
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
        stop_token_ids=rng.choice([[], [], [], [], [], [], [vocab - 1], list(range(1, min(vocab, 11)))]),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice([None, None, 0, 2]),
        seed=0,
    )


def run_schedule(core: EngineCore, schedule: Schedule, most_steps: int = 5000) -> dict[str, Outcome]:
    """Run until every request has ended; checks the core's integrity after each step, and that all comes back.

    Time is counted in steps. Raises AssertionError where a request gets no end, or something after its end, or lives
    longer than it may, or a step hangs.
    """
    outcomes = {request.request_id: Outcome() for request in schedule.requests}
    arrivals, step = list(schedule.requests), 0
    latest: dict[str, float] = {}
    core.scheduler.states.deadlines.clock = lambda: float(step)
    while arrivals or core.has_work():
        assert step < most_steps, f"no end after {step} steps: {core.stats()}"
        if not core.has_work():
            step = max(step, arrivals[0].arrives)
        while arrivals and arrivals[0].arrives <= step:
            request = arrivals.pop(0)
            core.add_request(request.to_request())
            latest[request.request_id] = step + (request.timeout or most_steps)
        core.abort([r.request_id for r in schedule.requests if r.aborted == step])
        for output in core.step().outputs:
            outcomes[output.request_id].take(output)
        core.check_integrity()
        assert all(latest[name] > step for name in core.scheduler.requests), "a request outlives its deadline"
        step += 1
    for request_id, outcome in outcomes.items():
        assert outcome.finish_reason is not None, f"{request_id} has not ended"
    stats = core.stats()
    settings = schedule.settings
    if not (settings.failing_loads or (settings.toy is not None and settings.toy.loss)):
        counts = {name: n for connector, name, n in stats.kv_connectors if connector == "canary"}
        assert not counts.get("mismatches") and not counts.get("stolen"), f"false alarms: {counts}"
    assert stats.pages_used == stats.num_running == stats.num_waiting == 0
    return outcomes
