"""Requests inside the core, and their slots: arrays over all running requests, so that a step's arithmetic is a few
array operations."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from engine.kv.index import table_suffix
from engine.kv.matching import Sequence
from engine.types.params import SamplingParams
from engine.types.plan import LeftSlots
from engine.types.request import EngineRequest

if TYPE_CHECKING:
    from engine.scheduling.matchers import RequestMatcher

EMPTY, PREFILL, DECODE = 0, 1, 2
"""Phases of a slot: nothing to plan; known tokens to compute; the last token placed is the only one to compute."""

NARROW_STOPS = 8
"""Stop ids that are compared for all rows at once; a request with more has a set of its own."""
NO_STOP = -2
"""Stands for no stop id: it equals no token and no -1 of a result."""


class Status(enum.Enum):
    """Where a request is.

    PENDING    waits for what is made for it beside the loop (`engine.scheduling.gates`), as its constraint's matcher
    HELD       waits for another of its parallel-sampling group to compute the prompt that they share
    WAITING    in the policy's queue
    RUNNING    in a slot, planned step by step
    DRAINING   preempted: its pages are given back, its slot keeps the tokens that steps under way still return
    SWAPPED    preempted, and the swap tier keeps what its pages held
    LOADING    its keys and values travel (`engine.scheduling.loading`), or a connector wants to be asked again
    FINISHED   ended; nobody looks at it again
    """

    PENDING = enum.auto()
    HELD = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    SWAPPED = enum.auto()
    LOADING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """What the scheduler keeps of a request beside its slot's arrays.

    Args:
        request: as it came.
        limit: the most tokens, prompt and output: the smaller of `max_tokens` and the model's length; where the request
            pools, those of its prompt.
        root: hash that stands before its first block.

    Attributes:
        token_ids: int32 [n]; all tokens known when it last was without a slot. In a slot, the slot's arrays hold them.
        slot: -1 where it has none.
        hashes: of its full blocks, as far as they were needed.
        lora_id: see `engine.kv.hashing.root_hash`; place: see `engine.interfaces.adapter.Adapted`.
        num_cached_tokens: of the prompt, when it was first admitted; -1 before.
        queued_at, admitted_at: seconds of `SlotTable.now()`: when it came, when it was first admitted.
        num_prompt_scored: prompt tokens whose log probabilities were sent, the first not counted.
        timeout, cache_salt, kv_transfer, kv_retention, encoder, adapter, embeds: see `EngineRequest`.
        num_loadable: see `engine.interfaces.kv_connector.Transferable`.
        reuses: what it has behind its cached prefix is approximate; no cache and no connector gets it.
        matcher: its place in its constraint, behind the tokens that were accepted; None where it has no constraint.
        pooling: for a request that draws nothing and ends with its prompt; None for one that generates.
        num_pooled: prompt tokens whose own vectors were sent.
    """

    def __init__(self, request: EngineRequest, table: SlotTable, limit: int, root: bytes) -> None:
        self.request_id = request.request_id
        self.arrival_time = request.arrival_time
        self.priority = request.priority
        self.params: SamplingParams = request.params
        self.parent = request.parent
        self.host_tokens = request.host_tokens
        self.timeout = request.timeout
        self.cache_salt = request.cache_salt
        self.kv_transfer = request.kv_transfer
        self.kv_retention = request.kv_retention
        self.encoder = request.encoder
        self.embeds = request.embeds
        self.num_encoder_tokens = 0 if request.encoder is None else request.encoder.num_tokens
        self.num_loadable = 0
        self.reuses = False
        self.token_ids = np.array(request.prompt_token_ids, np.int32)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.eos_token_ids = frozenset() if request.params.ignore_eos else frozenset(request.eos_token_ids)
        # In the order of their ids, so that equal requests make equal plans.
        self.stop_token_ids = np.array(sorted(self.eos_token_ids.union(request.params.stop_token_ids)), np.int32)
        self.limit = limit
        self.root = root
        self.adapter = request.adapter
        self.lora_id = None if request.adapter is None else request.adapter.identity
        self.place = 0
        self.table = table
        self.status = Status.HELD
        self.slot = -1
        self.hashes: list[bytes] = []
        self.num_cached_tokens = -1
        self.queued_at = self.admitted_at = table.now()
        self.num_prompt_scored = 0
        self.matcher: RequestMatcher | None = None
        self.pooling = request.pooling
        self.num_pooled = 0

    @property
    def num_tokens(self) -> int:
        """Known so far, prompt and output."""
        return int(self.table.known[self.slot]) if self.slot >= 0 else self.token_ids.size

    def block_keys(self, table: int) -> list[bytes]:
        """See `engine.interfaces.kv_connector.Transferable`."""
        suffix = table_suffix(table)
        return [hashed + suffix for hashed in self.hashes]

    def sequence(self, tokens: np.ndarray) -> Sequence:
        """What the KV manager reads of it: its first tokens, int32 [n]."""
        return Sequence(self.hashes, self.root, tokens, self.lora_id)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, slot={self.slot}, num_tokens={self.num_tokens})"


class SlotTable:
    """State of each slot. A slot that is given back is reusable only when the last step that names it is done.

    Args:
        num_slots: `max_num_seqs`.
        max_tokens: of one request.
        now: the clock: seconds that never go back.
        all_wait: `waits` holds for every slot: of several pipeline stages the first never sees a token drawn.

    Attributes (arrays over slots):
        phase: int8; EMPTY, PREFILL or DECODE. A request whose whole prompt is planned and which draws no token is EMPTY
            until its result is there.
        known: int32; tokens whose ids the host has seen.
        placed: int32; these and the placeholders of tokens that steps under way will draw.
        computed: int32; tokens whose keys and values are in the cache, or will be once the steps under way are done.
        limit: int32; `placed` never grows beyond it.
        prompt, min_tokens: int32; of the request.
        drafts: int32; of a step under way, beyond `computed`: how many of them stay is not known, and the slot is not
            planned again before it is. 0: none.
        accepts: bool; a token that returns belongs to the request (False: it has ended, the token is surplus).
        waits: bool; no token is planned before the one before it is known: the next plan tells the workers.
        num_waits: how many of these there are.
        proposed: bool; the drafts of the step under way came with the result before it.
        matched: bool; the request has a matcher: masks follow its steps.
        num_matched: how many of these there are.
        last_step: int64; the last step that names the slot.
        order: int64; counts admissions up, so that the oldest can be told.
        tokens: int32 [num_slots, max_tokens]; ids, valid up to `known`.
        stops: int32 [NARROW_STOPS, num_slots]; ids that end the request, padded with NO_STOP.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, all_wait: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_slots = num_slots
        self.all_wait = all_wait
        self.now = now
        self.phase = np.zeros(num_slots, np.int8)
        self.known = np.zeros(num_slots, np.int32)
        self.placed = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.prompt = np.zeros(num_slots, np.int32)
        self.min_tokens = np.zeros(num_slots, np.int32)
        self.drafts = np.zeros(num_slots, np.int32)
        self.accepts = np.zeros(num_slots, bool)
        self.waits = np.zeros(num_slots, bool)
        self.num_waits = 0
        self.proposed = np.zeros(num_slots, bool)
        self.matched = np.zeros(num_slots, bool)
        self.num_matched = 0
        self.last_step = np.zeros(num_slots, np.int64)
        self.order = np.zeros(num_slots, np.int64)
        self.tokens = np.empty((num_slots, max_tokens), np.int32)  # memory is taken as far as it is written
        self.stops = np.full((NARROW_STOPS, num_slots), NO_STOP, np.int32)
        self.wide_stops: dict[int, frozenset[int]] = {}
        self.requests: list[Request | None] = [None] * num_slots
        self._last: list[Request | None] = [None] * num_slots
        self.request_ids = [""] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._pending: list[tuple[int, int]] = []
        self._left: list[tuple[int, int]] = []
        self._admissions = 0

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    def enter(self, request: Request, computed: int) -> int:
        """Give a request a slot, with all its tokens known and the first `computed` of them in the cache."""
        slot = self._free.pop()
        n = request.token_ids.size
        self.requests[slot] = self._last[slot] = request
        self.request_ids[slot] = request.request_id
        self.phase[slot] = PREFILL
        self.known[slot] = self.placed[slot] = n
        self.computed[slot] = computed
        self.limit[slot] = request.limit
        self.prompt[slot] = request.num_prompt_tokens
        self.min_tokens[slot] = request.params.min_tokens
        self.accepts[slot] = True
        self.waits[slot] = request.host_tokens or self.all_wait
        self.num_waits += int(self.waits[slot])
        self.matched[slot] = request.matcher is not None
        self.num_matched += request.matcher is not None
        self.last_step[slot] = 0
        self._admissions += 1
        self.order[slot] = self._admissions
        self.tokens[slot, :n] = request.token_ids
        stops = request.stop_token_ids
        self.stops[:, slot] = NO_STOP
        if stops.size <= NARROW_STOPS:
            self.stops[: stops.size, slot] = stops
        else:
            self.wide_stops[slot] = frozenset(stops.tolist())
        request.slot = slot
        return slot

    def owner(self, slot: int) -> Request:
        """Whose rows under way name the slot: the request that has it, or that left it last."""
        request = self._last[slot]
        assert request is not None
        return request

    def request(self, slot: int) -> Request:
        """The request that has the slot."""
        request = self.requests[slot]
        assert request is not None
        return request

    def stop_ids(self, slot: int) -> frozenset[int]:
        """The ids that end the slot's request."""
        wide = self.wide_stops.get(slot)
        return frozenset(self.stops[:, slot].tolist()) - {NO_STOP} if wide is None else wide

    def leave(self, slot: int, done_step: int) -> None:
        """The slot's request has ended or taken its tokens out; give the slot back."""
        request = self.request(slot)
        self._left.append((slot, int(self.known[slot])))
        request.slot = -1
        self.requests[slot] = None
        self.phase[slot] = EMPTY
        self.accepts[slot] = False
        self.drafts[slot] = 0
        self.num_waits -= int(self.waits[slot])
        self.waits[slot] = False
        self.num_matched -= int(self.matched[slot])
        self.matched[slot] = False
        self.wide_stops.pop(slot, None)
        last = int(self.last_step[slot])
        if last > done_step:
            self._pending.append((last, slot))
        else:
            self._free.append(slot)

    def take_left(self) -> LeftSlots | None:
        """The slots that were left since the last call; None where there are none."""
        if not self._left:
            return None
        slot, num_tokens = np.array(self._left, np.int32).T.copy()
        self._left.clear()
        return LeftSlots(slot=slot, num_tokens=num_tokens)

    def step_done(self, step_id: int) -> None:
        """This step, and all before it, no longer name any slot."""
        if self._pending:
            self._free.extend(slot for last, slot in self._pending if last <= step_id)
            self._pending = [entry for entry in self._pending if entry[0] > step_id]

    def check_integrity(self) -> None:
        """Raise AssertionError where the arrays contradict each other."""
        taken = [slot for slot, request in enumerate(self.requests) if request is not None]
        pending = [slot for _, slot in self._pending]
        assert sorted([*taken, *pending, *self._free]) == list(range(self.num_slots)), "a slot is lost or given twice"
        for slot in taken:
            assert self.request(slot).slot == slot and (self.accepts[slot] or self.phase[slot] == EMPTY)
            assert self.known[slot] <= self.placed[slot] <= self.placed[slot] + self.drafts[slot] <= self.limit[slot]
            if self.phase[slot] == DECODE:
                assert self.computed[slot] == self.placed[slot] - 1
            if self.phase[slot] == PREFILL:
                assert self.computed[slot] < self.placed[slot] == self.known[slot]
        assert not self.drafts[[*pending, *self._free]].any()
        assert self.num_waits == np.count_nonzero(self.waits)
        assert self.num_matched == np.count_nonzero(self.matched)
        assert not self.phase[[*pending, *self._free]].any() and not self.accepts[[*pending, *self._free]].any()
