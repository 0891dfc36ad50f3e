"""A worker whose next token is a pure function of the tokens that a real model would see, read from real pages.

It does with integers what a runner does with tensors: each KV group is one layer; a layer writes a cell for each token
of the step at its place in the token's page, beside those of the other groups of its table, then each query folds the
cells that it sees, found through the block table, into its state, which the next layer's cells depend on. So each cell
depends on the whole prefix, and a wrong block table, a page reused too early, a stale cell, or a lost or doubled token
changes the tokens that come out.
What an encoder reads for a request is added to each of its cells.
`alone` computes the same function without pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from drafting import Propose
from masking import ScriptedGrammar
from toy_store import ToyOptions, ToyWorker

from engine.interfaces.context import WorkerContext
from engine.process import wire
from engine.types.kv import KVLayout
from engine.types.params import SamplingParams
from engine.types.plan import LogprobRows, Masks, StepPlan, StepResult
from engine.types.request import EncoderInput
from engine.types.start import WorkerReady, WorkerStart
from engine_kit.kv_canary import CANARY
from engine_kit.ranks import call_worker
from engine_reference.connector_host.scheduler_half import Copies
from engine_reference.connector_host.worker_half import HostWorker

VOCAB = 13
RowMasks = dict[int, list[set[int]]]
"""What the first positions of each row may draw."""


def make_grammar(delay: Callable[[str], Any] = lambda seed: None) -> ScriptedGrammar:
    """Of these workers. Id 11 is always allowed: no schedule makes it a stop id."""
    return ScriptedGrammar(VOCAB, 11, delay)


_FACTORS = (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 1, 30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
_U64_FACTORS = tuple(map(np.uint64, _FACTORS))
_MASK = 2**64 - 1


def mix(a: np.ndarray, b: np.ndarray | int) -> np.ndarray:
    """Two uint64 into one (SplitMix64's finaliser)."""
    fa, fb, one, s1, f1, s2, f2, s3 = _U64_FACTORS
    b = b.astype(np.uint64) * fb if isinstance(b, np.ndarray) else np.uint64(int(b) * _FACTORS[1] & _MASK)
    x = a * fa + b + one
    x = (x ^ (x >> s1)) * f1
    x = (x ^ (x >> s2)) * f2
    return x ^ (x >> s3)


def draw(
    state: int, params: SamplingParams, stops: set[int], num_outputs: int, allowed: Collection[int] = range(VOCAB)
) -> int:
    """The token that a state gives: no stop id before `min_tokens` outputs, and none that a mask forbids."""
    token = state % VOCAB
    while token not in allowed or (num_outputs < params.min_tokens and token in stops):
        token = (token + 1) % VOCAB
    return token


def logprob_entry(token: int, k: int) -> tuple[float, int, list[int], list[float]]:
    """Made-up log probabilities that tell which token they belong to."""
    return -float(token) / 4, token + 1, [(token + i) % VOCAB for i in range(k)], [-float(i) for i in range(k)]


def hears(encoder: EncoderInput | None) -> np.uint64:
    """What all of a request's tokens take from its encoder's input."""
    return np.uint64(0) if encoder is None else fold(np.uint64(1), encoder.data.astype(np.uint64))[-1]


def alone(
    layout: KVLayout,
    prompt: list[int],
    params: SamplingParams,
    eos: list[int],
    max_model_len: int,
    encoder: EncoderInput | None = None,
) -> tuple[list[int], str]:
    """The tokens that a request gets by itself, and why it ends."""
    tokens = list(prompt)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    matcher = None
    if params.structured_outputs is not None:
        matcher = make_grammar().compile(params.structured_outputs, eos)
    while True:
        positions = np.arange(len(tokens))
        x = mix(np.array(tokens, np.uint64), positions) + hears(encoder)
        for g, group in enumerate(layout.groups):
            cells = mix(mix(x, positions), g)
            if group.kind == "state":
                x = mix(x, fold(np.uint64(0), cells))
            else:
                x = mix(x, _visible_sums(cells, positions, 0, group.sliding_window))
        num_outputs = len(tokens) - len(prompt)
        start = None if params.structured_outputs is None else params.structured_outputs.start_after
        begun = start is None or any(tokens[i : i + len(start)] == start for i in range(len(prompt), len(tokens)))
        allowed = matcher.allowed if matcher is not None and begun else range(VOCAB)
        token = draw(int(x[-1]), params, stops, num_outputs, allowed)
        tokens.append(token)
        if token in stops and num_outputs + 1 >= params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if matcher is not None and begun:
            assert matcher.accept([token]) == 1
            if matcher.finished:
                return tokens[len(prompt) :], "complete"
        if num_outputs + 1 == params.max_tokens or len(tokens) == max_model_len:
            return tokens[len(prompt) :], "length"


def table_widths(layout: KVLayout, max_model_len: int) -> list[int]:
    """Blocks of the longest sequence."""
    return [-(-max_model_len // table.tokens_per_block) for table in layout.tables]


def fold(state: np.uint64, cells: np.ndarray) -> np.ndarray:
    """The state after each of these cells: `mix`, in Python's integers, which are the faster ones one by one."""
    fa, fb, one, s1, f1, s2, f2, s3 = _FACTORS
    x, states = int(state), []
    for cell in cells.tolist():
        x = (x * fa + cell * fb + one) & _MASK
        x = ((x ^ (x >> s1)) * f1) & _MASK
        x = ((x ^ (x >> s2)) * f2) & _MASK
        x ^= x >> s3
        states.append(x)
    return np.array(states, np.uint64)


def _visible_sums(cells: np.ndarray, positions: np.ndarray, first: int, window: int | None) -> np.ndarray:
    """For each query the sum of the cells that it sees; `cells[i]` is that of position `first + i`."""
    sums = np.append(np.uint64(0), np.cumsum(cells, dtype=np.uint64))
    low = positions * 0 if window is None else np.maximum(positions - window + 1, 0)
    return sums[positions + 1 - first] - sums[np.maximum(low, first) - first]


class Done:
    """A step's future, done once it was sampled: at once where no masks follow."""

    def __init__(self, result: StepResult | None) -> None:
        self.step_result = result

    def done(self) -> bool:
        return self.step_result is not None

    def result(self, timeout: float | None = None) -> StepResult:
        assert self.step_result is not None, "a step is waited for that has no masks yet"
        return self.step_result


class PagedWorker:
    """See the module. Its block tables, tokens and pages are public, for tests.

    Args:
        message: sizes.
        propose: a drafter; drafts are accepted as far as they equal what is drawn.
        failing_loads: the share of loaded pages that are reported as failed, and hold nothing.
        toy: how the toy store behaves.
    """

    def __init__(
        self,
        message: WorkerStart,
        propose: Propose | None = None,
        failing_loads: float = 0.0,
        toy: ToyOptions | None = None,
    ) -> None:
        self.propose = propose
        self.failing_loads = failing_loads
        self.rng = np.random.default_rng(1)
        self.num_failed = 0
        self.max_model_len = message.max_model_len
        self._truths: dict[str, list[int]] = {}
        self.layout = message.layout
        self.num_pages = message.num_kv_pages or 0
        slots, length = message.max_num_seqs, message.max_model_len
        self.tokens = np.full((slots, length + 1), -1, np.int64)
        widths = table_widths(self.layout, length)
        self.block_tables = [np.full((slots, width), -1, np.int64) for width in widths]
        most = max(table.tokens_per_block for table in self.layout.tables)
        tables = [group.table for group in self.layout.groups]
        self.first = [tables[:g].count(table) * most for g, table in enumerate(tables)]  # cell of each group in a page
        in_page = max(tables.count(table) for table in tables) * most
        in_page += self.layout.mark_bytes // 8
        self.cells = np.random.default_rng(0).integers(0, 2**63, (self.num_pages, in_page)).astype(np.uint64)
        context = WorkerContext(start=message)
        self.connectors = {
            "host": HostWorker(context),
            "toy": ToyWorker(replace(context, options=toy)),
            "canary": CANARY.worker(context),
        }
        for connector in self.connectors.values():
            connector.register(torch.from_numpy(self.cells.view(np.uint8)))
        self.new_slot = [None] * slots
        self.heard = np.zeros(slots, np.uint64)
        self.max_num_batched_tokens = message.max_num_batched_tokens
        self.num_steps = self.num_copies = self.num_given = 0
        self._states: dict[int, np.ndarray] = {}
        self._open: tuple[int, Done, Callable[..., StepResult]] | None = None
        self.stopped = False

    def start(self) -> WorkerReady:
        return WorkerReady(num_pages=self.num_pages, weight_bytes=0, cache_bytes=0, num_parameters=0, load_seconds=0.0)

    def shutdown(self) -> None:
        self.stopped = True

    def execute(self, plan: StepPlan) -> Done:
        assert self._open is None, "a step is launched before the one before it was sampled"
        self._check_form(plan)
        self._take_in(plan)
        for name, section in (plan.sections or {}).items():
            self.connectors[name].begin(plan.step_id, section or None)
        news = {}
        for name, section in (plan.sections or {}).items():
            self.connectors[name].load(plan.step_id)
            if name == "canary":
                continue  # which checks when all is done
            told = self._spoil(section) if name == "host" else self.connectors[name].news()
            if told:
                news[name] = [told]
        self._copy_pages(plan)
        if not plan.num_rows:
            self._end(plan, news)
            return Done(StepResult(step_id=plan.step_id, tokens=np.empty(0, np.int32), news=news or None))
        if plan.num_drafts is not None:
            plan = self._draft(plan)
        rows = np.repeat(np.arange(plan.num_rows), plan.num_tokens)
        slots = plan.slot_of_row[rows]
        ends = np.cumsum(plan.num_tokens)
        positions = np.arange(ends[-1]) - (ends - plan.num_tokens)[rows] + plan.num_computed[rows]
        ids = self.tokens[slots, positions]
        assert (ids >= 0).all(), "a token is computed that nobody has placed"
        x = mix(ids.astype(np.uint64), positions) + self.heard[slots]
        for g, group in enumerate(self.layout.groups):
            size = group.tokens_per_block
            pages, first = self.block_tables[group.table][slots, positions // size], self.first[g]
            assert (pages > 0).all(), "a token has no page"
            places = pages * size + positions % size
            assert np.unique(places).size == places.size, "two tokens are written to one place"
            cells = mix(mix(x, positions), g)
            if group.kind == "state":
                x = mix(x, self._scan(plan, g, cells, ends))
                continue
            self.cells[pages, first + positions % size] = cells
            x = mix(x, self._read(plan, g, positions, ends))
        self._end(plan, news)
        if not plan.masks_follow:
            return Done(self._result(plan, x, ends, news, {}))
        future = Done(None)
        self._open = plan.step_id, future, partial(self._result, plan, x, ends, news)
        self._drafted = plan
        return future

    def _end(self, plan: StepPlan, news: dict[str, list[bytes]]) -> None:
        for name in plan.sections or ():
            self.connectors[name].end(plan.step_id)
            if name == "canary" and (told := self.connectors[name].news()):
                news[name] = [told]

    def drafts(self, step_id: int) -> list[list[int]]:
        plan = self._drafted
        assert self._open is not None and self._open[0] == plan.step_id == step_id and plan.num_drafts is not None
        rows = zip(plan.slot_of_row.tolist(), plan.num_computed.tolist(), plan.num_drafts.tolist(), strict=True)
        return [self.tokens[slot, n + 1 : n + 1 + k].tolist() for slot, n, k in rows]

    def _result(
        self, plan: StepPlan, x: np.ndarray, ends: np.ndarray, news: dict[str, list[bytes]], masks: RowMasks
    ) -> StepResult:
        result = self._sample(plan, x, ends, masks)
        return msgspec.structs.replace(result, news=news) if news else result

    def sample(self, step_id: int, masks: Masks) -> None:
        assert self._open is not None
        open_id, future, rest = self._open
        assert open_id == step_id and masks.row.dtype == masks.bits.dtype == np.int32
        assert masks.bits.shape == (masks.row.size, -(-VOCAB // 32))
        bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
        assert (np.diff(masks.row) >= 0).all()
        of_row: RowMasks = {}
        for row, b in zip(masks.row.tolist(), bits, strict=True):
            of_row.setdefault(row, []).append(set(np.flatnonzero(b).tolist()))
        self._open = None
        future.step_result = rest(of_row)

    def _spoil(self, section: bytes) -> bytes:
        """Spoil some of the pages that were loaded: they failed."""
        loaded = wire.decoder(Copies).decode(section).in_page
        failed = loaded[self.rng.random(loaded.size) < self.failing_loads]
        self.num_failed += failed.size
        self.cells[failed] = self.rng.integers(0, 2**63, (failed.size, self.cells.shape[1])).astype(np.uint64)
        return failed.tobytes()

    def _draft(self, plan: StepPlan) -> StepPlan:
        """Put drafts behind the rows' tokens; the plan, cut to what was found."""
        assert plan.num_drafts is not None
        found = np.zeros(plan.num_rows, np.int32)
        given = {} if plan.given_drafts is None else self._given(plan)
        self.num_given += len(given)
        for row in np.flatnonzero(plan.num_drafts).tolist():
            slot, at, k = int(plan.slot_of_row[row]), int(plan.num_computed[row]) + 1, int(plan.num_drafts[row])
            new = self.new_slot[slot]
            if row in given:
                assert (self.tokens[slot, at : at + k] == -1).all() and len(given[row]) == k
                found[row], self.tokens[slot, at : at + k] = k, given[row]
                continue
            assert self.propose is not None
            prompt = new.token_ids[: new.num_prompt_tokens].tolist()
            if new.request_id not in self._truths:
                stops = new.stop_token_ids.tolist()
                self._truths[new.request_id], _ = alone(
                    self.layout, prompt, new.params, stops, self.max_model_len, new.encoder
                )
            drafts = self.propose(self._truths[new.request_id], self.tokens[slot, len(prompt) : at].tolist(), k)
            assert (self.tokens[slot, at : at + k] == -1).all(), "drafts are put over tokens"
            found[row] = len(drafts)
            self.tokens[slot, at : at + len(drafts)] = drafts
        num_tokens = np.where(plan.num_drafts > 0, 1 + found, plan.num_tokens).astype(np.int32)
        return msgspec.structs.replace(plan, num_tokens=num_tokens, num_drafts=found)

    def _given(self, plan: StepPlan) -> dict[int, list[int]]:
        given = plan.given_drafts
        assert given is not None and given.row.dtype == given.tokens.dtype == np.int32
        assert (np.diff(given.row) > 0).all() and (given.tokens < VOCAB).all()
        return {
            row: [t for t in of_row if t >= 0]
            for row, of_row in zip(given.row.tolist(), given.tokens.tolist(), strict=True)
        }

    def _scan(self, plan: StepPlan, g: int, cells: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The states after each token; those at the ends of blocks, and the last, go into the pages. All states are
        read before any is written: a row does not see what another row of its step leaves."""
        group, first = self.layout.groups[g], self.first[g]
        size, table = group.tokens_per_block, self.block_tables[group.table]
        states = np.empty_like(cells)
        befores = []
        for row, slot in enumerate(plan.slot_of_row.tolist()):
            start = int(plan.num_computed[row])
            befores.append(self.cells[table[slot, (start - 1) // size], first] if start else np.uint64(0))
        for row, slot in enumerate(plan.slot_of_row.tolist()):
            start, n = int(plan.num_computed[row]), int(plan.num_tokens[row])
            mine = slice(int(ends[row]) - n, int(ends[row]))
            states[mine] = fold(befores[row], cells[mine])
            last = np.append(np.arange((start // size + 1) * size, start + n, size), start + n) - 1
            self.cells[table[slot, last // size], first] = states[mine][last - start]
        self._states[g] = states
        return states

    def _restore(self, plan: StepPlan, row: int, count: int, end: int) -> None:
        """Of the row's drafts all but `count - 1` were rejected: the state after the last one that counts goes back."""
        slot, kept = int(plan.slot_of_row[row]), int(plan.num_computed[row]) + count
        for g, states in self._states.items():
            group = self.layout.groups[g]
            page = self.block_tables[group.table][slot, (kept - 1) // group.tokens_per_block]
            self.cells[page, self.first[g]] = states[end - int(plan.num_tokens[row]) + count - 1]

    def _read(self, plan: StepPlan, g: int, positions: np.ndarray, ends: np.ndarray) -> np.ndarray:
        group = self.layout.groups[g]
        size, window = group.tokens_per_block, group.sliding_window
        sums = np.empty(positions.size, np.uint64)
        for row, slot in enumerate(plan.slot_of_row.tolist()):
            mine = slice(int(ends[row] - plan.num_tokens[row]), int(ends[row]))
            first = 0 if window is None else max(0, int(positions[mine][0]) - window + 1)
            seen = np.arange(first, int(positions[mine][-1]) + 1)
            pages = self.block_tables[group.table][slot, seen // size]
            assert (pages > 0).all(), "a query sees a token that has no page"
            sums[mine] = _visible_sums(self.cells[pages, self.first[g] + seen % size], positions[mine], first, window)
        return sums

    def _check_form(self, plan: StepPlan) -> None:
        self.num_steps += 1
        assert plan.step_id == self.num_steps
        assert (plan.num_rows > 0 or plan.sections or plan.idle_tokens) and (plan.num_tokens > 0).all()
        encoded = sum(new.encoder.num_tokens for new in plan.new_slots if new.encoder is not None)
        assert plan.total_tokens + encoded <= self.max_num_batched_tokens
        assert np.unique(plan.slot_of_row).size == plan.num_rows, "a slot has two rows"
        d = plan.num_decodes
        assert (plan.num_tokens[:d] == 1).all() and plan.samples[:d].all()
        assert (np.diff(plan.num_tokens[d:]) >= 0).all(), "short extends come before prefills"
        if plan.num_drafts is not None:
            drafted = plan.num_drafts > 0
            assert drafted.any() and plan.samples[drafted].all() and not drafted[:d].any()
            assert (plan.num_tokens[drafted] == 1 + plan.num_drafts[drafted]).all()
            assert plan.num_drafts.dtype == np.int32
        for array in (plan.slot_of_row, plan.num_computed, plan.num_tokens):
            assert array.dtype == np.int32
        assert len(plan.new_blocks) == len(self.layout.tables)

    def _take_in(self, plan: StepPlan) -> None:
        if plan.left_slots is not None:
            for slot, count in zip(plan.left_slots.slot.tolist(), plan.left_slots.num_tokens.tolist(), strict=True):
                assert self.new_slot[slot] is not None, "a slot is left twice, or was never entered"
                assert count >= self.new_slot[slot].token_ids.size and (self.tokens[slot, :count] >= 0).all()
                self.new_slot[slot] = None
        for new in plan.new_slots:
            assert self.new_slot[new.slot] is None, "a slot is entered that nobody has left"
            self.new_slot[new.slot] = new
            self.heard[new.slot] = hears(new.encoder)
            self.tokens[new.slot] = -1
            self.tokens[new.slot, : new.token_ids.size] = new.token_ids
            for table in self.block_tables:
                table[new.slot] = -1
        for of_layout, table, new in zip(self.layout.tables, self.block_tables, plan.new_blocks, strict=True):
            assert new.slot.dtype == new.index.dtype == new.page.dtype == np.int32
            assert ((new.page > 0) & (new.page < self.num_pages)).all()
            second = table[new.slot, new.index] != -1
            if self.propose is not None or self.num_given:  # pages of rejected drafts went back: blocks begin anew
                computed = np.zeros(table.shape[0], np.int64)
                computed[plan.slot_of_row] = plan.num_computed
                size = of_layout.tokens_per_block
                second &= new.index * size < computed[new.slot]
            assert not second.any(), "a block gets a second page"
            table[new.slot, new.index] = new.page

    def _copy_pages(self, plan: StepPlan) -> None:
        copies = plan.copies
        if copies is None:
            return
        source, destination = copies.source, copies.destination
        assert source.dtype == destination.dtype == copies.table.dtype == np.int32
        assert copies.table.size == source.size == destination.size > 0
        assert np.unique(destination).size == destination.size and not np.isin(source, destination).any()
        assert ((source > 0) & (source < self.num_pages) & (destination > 0) & (destination < self.num_pages)).all()
        for table, page in zip(copies.table.tolist(), destination.tolist(), strict=True):
            assert page in plan.new_blocks[table].page, "a page is copied to that nobody gets"
        self.num_copies += source.size
        self.cells[destination] = self.cells[source]

    def _sample(self, plan: StepPlan, states: np.ndarray, ends: np.ndarray, masks: RowMasks) -> StepResult:
        num_drafts = np.zeros(plan.num_rows, np.int32) if plan.num_drafts is None else plan.num_drafts
        tokens = np.full((plan.num_rows, 1 + int(num_drafts.max())), -1, np.int32)
        asked = []
        for row in np.flatnonzero(plan.samples).tolist():
            slot, k = int(plan.slot_of_row[row]), int(num_drafts[row])
            new, first = self.new_slot[slot], int(plan.num_computed[row] + plan.num_tokens[row]) - k
            stops = set(new.stop_token_ids.tolist())
            drafts = self.tokens[slot, first : first + k].tolist()
            # A constrained row without a mask belongs to a request that has ended: what it draws is dropped.
            allowed = masks.get(row, [])
            assert len(allowed) <= 1 + k and (row not in masks or new.params.structured_outputs is not None)
            self.tokens[slot, first : first + k] = -1
            for i, state in enumerate(states[ends[row] - 1 - k : ends[row]].tolist()):
                here: Collection[int] = allowed[i] if i < len(allowed) else range(VOCAB)  # it does not count there
                token = draw(state, new.params, stops, first + i - new.num_prompt_tokens, here)
                assert self.tokens[slot, first + i] == -1, "a known token is drawn again"
                self.tokens[slot, first + i] = tokens[row, i] = token
                if new.params.logprobs is not None:
                    asked.append((row, token, new.params.logprobs))
                if i < k and token != drafts[i]:
                    break
            if k:
                self._restore(plan, row, i + 1, int(ends[row]))
        if plan.num_drafts is None:
            tokens = tokens[:, 0]
        logprobs = None
        if asked:
            k = max(entry[2] for entry in asked)
            entries = [logprob_entry(token, k) for _, token, _ in asked]
            logprobs = LogprobRows(
                row=np.array([entry[0] for entry in asked], np.int32),
                chosen=np.array([entry[0] for entry in entries], np.float32),
                rank=np.array([entry[1] for entry in entries], np.int32),
                top_ids=np.array([entry[2] for entry in entries], np.int32).reshape(len(asked), k),
                top_values=np.array([entry[3] for entry in entries], np.float32).reshape(len(asked), k),
            )
        return StepResult(step_id=plan.step_id, tokens=tokens, logprobs=logprobs, num_drafts=plan.num_drafts)


class Held:
    """A step's future that is not done before later plans are sent, or its result is waited for."""

    def __init__(self, executor: HoldingExecutor, plan: StepPlan, inner: object) -> None:
        self._executor = executor
        self._plan = plan
        self._inner = inner
        self.released = False

    def done(self) -> bool:
        return self.released and self._inner.done()

    def result(self, timeout: float | None = None) -> StepResult:
        result = self._inner.result(timeout)
        self._executor.taken(self._plan, result)
        return result


class HoldingExecutor:
    """Runs a worker on the caller's thread and holds each result back until later plans are sent.

    Args:
        hold: how many of them; 0: a result is there at once.

    It works with any worker, and checks what a plan may not do while another is under way: reuse a slot, write to a
    page that the other names, plan a request again that was preempted, or one whose drafts are not decided.

    Attributes:
        num_placeholders: rows that computed a token whose id the host had not seen.
        most_in_flight: steps under way at once.
        num_ahead: steps launched before the tokens were known that their masks depend on.
    """

    def __init__(
        self,
        worker: object,
        layout: KVLayout,
        max_num_seqs: int,
        max_model_len: int,
        hold: int = 1,
    ) -> None:
        self.worker = worker
        self.layout = layout
        self.hold = hold
        self.num_placeholders = 0
        self.most_in_flight = self.num_ahead = 0
        self._unsampled: StepPlan | None = None
        self._taken = self._taken_at_launch = 0
        self._host_known = np.zeros(max_num_seqs, np.int64)
        self._ids = [""] * max_num_seqs
        self._copied: list[set[tuple[int, int]]] = [set() for _ in self._ids]  # (step, page) copied from each slot's
        self._tables = [np.full((max_num_seqs, width), -1) for width in table_widths(layout, max_model_len)]
        self._under_way: deque[tuple[StepPlan, list[str], dict[int, set[int]]]] = deque()
        self._held: deque[Held] = deque()

    def start(self, message: WorkerStart) -> WorkerReady:
        return self.worker.start()

    def sample(self, step_id: int, masks: Masks) -> None:
        assert self._unsampled is not None and self._unsampled.step_id == step_id
        self.num_ahead += self._taken > self._taken_at_launch
        self._unsampled = None
        self.worker.sample(step_id, masks)

    def execute(self, plan: StepPlan) -> Held:
        assert self._unsampled is None, "sample(N) comes before execute(N + 1)"
        self._unsampled = plan if plan.masks_follow else None
        self._taken_at_launch = self._taken
        self._check(plan)
        future = Held(self, plan, self.worker.execute(plan))
        self._held.append(future)
        while len(self._held) > self.hold:
            self._held.popleft().released = True
        return future

    def _check(self, plan: StepPlan) -> None:
        for new in plan.new_slots:
            for other, ids, _ in self._under_way:
                assert new.slot not in other.slot_of_row, "a slot is reused while a step names it"
                assert new.request_id not in ids, "a preempted request is planned while a step names it"
            self._ids[new.slot] = new.request_id
            self._copied[new.slot] = set()
            self._host_known[new.slot] = new.token_ids.size
            for table in self._tables:
                table[new.slot] = -1
        for table, new in zip(self._tables, plan.new_blocks, strict=True):
            table[new.slot, new.index] = new.page
        starts, ends = plan.num_computed, plan.num_computed + plan.num_tokens
        drafts = 0 if plan.num_drafts is None else plan.num_drafts
        self.num_placeholders += int((ends - drafts > self._host_known[plan.slot_of_row]).sum())
        for other, ids, _ in self._under_way:
            if other.num_drafts is not None:
                undecided = set(np.array(ids)[other.num_drafts > 0].tolist())
                planned = {self._ids[slot] for slot in plan.slot_of_row.tolist()}
                assert not undecided & planned, "a request is planned before its drafts are decided"
        named: dict[int, set[int]] = {}
        for slot, start, end in zip(plan.slot_of_row.tolist(), starts.tolist(), ends.tolist(), strict=True):
            named[slot] = set()
            for table, of_layout in zip(self._tables, self.layout.tables, strict=True):
                size, window = of_layout.tokens_per_block, of_layout.window
                first = 0 if window is None else max(0, start - window + 1) // size
                last = -(-end // size)
                written = set(table[slot, start // size : last].tolist())
                named[slot].update(table[slot, first:last].tolist())
                for _, _, others in self._under_way:
                    for other, pages in others.items():
                        assert other == slot or not written & pages, "a page is reused while a step names it"
                for other, _, _ in self._under_way:
                    for page in written.intersection([] if other.copies is None else other.copies.source.tolist()):
                        # The slot that the page is copied from may fill it on.
                        assert (other.step_id, page) in self._copied[slot], "a page is reused while it is copied"
        for page in [] if plan.copies is None else plan.copies.source.tolist():
            for slot in range(len(self._ids)):
                if any(page in table[slot] for table in self._tables):
                    self._copied[slot].add((plan.step_id, page))
        ids = [self._ids[slot] for slot in plan.slot_of_row.tolist()]
        self._under_way.append((plan, ids, named))
        self.most_in_flight = max(self.most_in_flight, len(self._under_way))

    def taken(self, plan: StepPlan, result: StepResult) -> None:
        self._taken += 1
        first, ids, _ = self._under_way.popleft()
        assert first is plan, "results are taken out of order"
        if not plan.num_rows:
            return
        counts = (result.tokens.reshape(plan.num_rows, -1) >= 0).sum(axis=1).tolist()
        for slot, request_id, count in zip(plan.slot_of_row.tolist(), ids, counts, strict=True):
            if self._ids[slot] == request_id:
                self._host_known[slot] += count

    def call(self, method: str, *args: object, rank: int | None = None) -> list[object]:
        return [call_worker(self.worker, method, args)]

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.worker.shutdown()
