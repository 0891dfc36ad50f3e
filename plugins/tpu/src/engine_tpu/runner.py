"""From a step's plan to its tokens: what the host does for each step.

Requests enter slots; pages are copied; all that the step needs to know goes to the device in one array; the model runs;
the positions that draw are drawn, and the tokens stay on the device, where the next step reads them. Results are
fetched while the next step runs: nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from engine.interfaces.executor import StepFuture
from engine.types.plan import (
    BROKEN,
    ErrorParts,
    LogprobRows,
    Masks,
    NewBlocks,
    PromptLogprobRows,
    StepPlan,
    StepResult,
)
from engine.types.start import WorkerStart
from engine_kit.transfers import Transfers
from engine_tpu.buckets import SAMPLED, Bucket, Buckets, fill_tokens
from engine_tpu.drafting import Drafting
from engine_tpu.edits import Edits
from engine_tpu.results import FailedStep, PendingSample, RunningStep
from engine_tpu.sampling import Logprobs
from engine_tpu.sampling import Masks as DeviceMasks
from engine_tpu.slots import SlotParameters
from engine_tpu.steps import SCORED, Forwarded, Memory, Steps

logger = logging.getLogger(__name__)


class Drawing(NamedTuple):
    """Where a step draws, on the host: at n positions, each sampling row's last token and those that drafts follow.

    Args:
        row: int64 [n]; of the plan. offset: int64 [n]; the place of each among its row's positions.
        slot, place: int64 [n]; where the drawn token goes. token: int64 [n]; which of the step's tokens draws.
        drafts: int64 [n]; of its row.
    """

    row: np.ndarray
    offset: np.ndarray
    slot: np.ndarray
    place: np.ndarray
    token: np.ndarray
    drafts: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan) -> Drawing:
        """A plan's."""
        row = np.flatnonzero(plan.samples)
        drafts = np.zeros(plan.num_rows, np.int64) if plan.num_drafts is None else plan.num_drafts.astype(np.int64)
        counts = 1 + drafts[row]
        row = np.repeat(row, counts)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        within = plan.num_tokens[row] - 1 - drafts[row] + offset
        starts = np.cumsum(plan.num_tokens, dtype=np.int64) - plan.num_tokens
        slot, place = plan.slot_of_row[row].astype(np.int64), plan.num_computed[row] + 1 + within
        return cls(row, offset, slot, place, starts[row] + within, drafts[row])


class Runner:
    """Computes steps.

    Args:
        start: sizes and limits.
        steps: the compiled functions.
        memory: what they keep.
        buckets: which are compiled.
        drafting: proposes drafts; None where there is no drafter.
        transfers: moves pages; None where no connector is at work.
    """

    def __init__(
        self,
        start: WorkerStart,
        steps: Steps,
        memory: Memory,
        buckets: Buckets,
        drafting: Drafting | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        self._drafting = drafting
        self._transfers = transfers
        self._steps = steps
        self._memory = memory
        self._buckets = buckets
        self._vocab_size = start.model.vocab_size
        self._logits_dtype = np.float64 if start.dtype == "float64" else np.float32
        self._parameters = SlotParameters(start.max_num_seqs + 1, start.model.vocab_size)
        self._edits = Edits(steps, memory, start.max_num_seqs + 1, self._vocab_size)
        self._words = -(-self._vocab_size // 32)
        self._open: PendingSample | FailedStep | None = None

    def warm_up(self, tell: Callable[[int, int, Bucket], None]) -> None:
        """Compile and run every bucket on padding. tell: called before each, with its number and how many there are."""
        steps, memory, sizes = self._steps, self._memory, list(self._buckets)
        steps.enter(memory, 0, np.zeros(1, np.int32))
        steps.place(memory, np.zeros((4, 0), np.int32))
        steps.put(memory, np.zeros((3, 0), np.int32))
        none = np.zeros(0, np.int32)
        steps.copy(memory, none, none)
        for number, bucket in enumerate(sizes):
            tell(number, len(sizes), bucket)
            steps.run_padding(memory, bucket)
        self._edits.warm_up({bucket.draws for bucket in sizes}, self._logits_dtype)

    def execute(self, plan: StepPlan) -> StepFuture:
        """Launch a step. An error of the launch is the future's."""
        assert self._open is None, "a step is sampled before the next is launched"
        try:
            return self._execute(plan)
        except Exception as error:
            failed = FailedStep(error)
            if plan.masks_follow:
                self._open = failed
            return failed

    def sample(self, step_id: int, masks: Masks) -> None:
        """Go on with the step whose masks follow. An error is its future's."""
        step = self._open
        self._open = None
        if not isinstance(step, FailedStep):
            assert step is not None and step.step_id == step_id
            step.sample(masks)

    def drafts(self, step_id: int) -> list[list[int]]:
        """Those of each row of the step whose masks follow. Raises the error of its launch."""
        step = self._open
        if isinstance(step, FailedStep):
            step.result()
        assert isinstance(step, PendingSample) and step.step_id == step_id
        return step.drafts()

    def _execute(self, plan: StepPlan) -> StepFuture:
        steps, memory = self._steps, self._memory
        if self._drafting is not None:
            plan = self._drafting.begin(plan)
        for new in plan.new_slots:
            self._parameters.enter(new)
            self._edits.enter(new)
            steps.enter(memory, new.slot, new.token_ids)
        entries = _entries(plan.new_blocks)
        if plan.given_drafts is not None:
            self._put_drafts(plan)
        if self._transfers is not None:
            plan = self._transfers.begin(plan)
        if plan.copies is not None:
            steps.copy(memory, plan.copies.source, plan.copies.destination)
        if not plan.num_rows:
            if entries.shape[1]:
                steps.place(memory, entries)
            told = self._ended(plan)
            return RunningStep(plan.step_id, (), lambda arrays: told(_result(plan)))
        drawing = Drawing.of(plan)
        decodes = plan.num_decodes == plan.num_rows
        bucket = self._buckets.of(plan.num_rows, plan.total_tokens, len(drawing.row), decodes)
        packing = steps.packing(bucket)
        if entries.shape[1] > packing.new_blocks:
            steps.place(memory, entries)
            entries = entries[:, :0]
        packed, views = packing.array()
        fill_tokens(views, plan, bucket, steps.page_size)
        for name, array in zip(("new_table", "new_slot", "new_index", "new_page"), entries, strict=True):
            views[name][: len(array)] = array
        asked = self._fill_drawing(views, drawing, decodes)
        given = steps.forward(memory, bucket, steps.send(packed))
        finish = partial(self._finish, plan, drawing, given, asked)
        if not plan.masks_follow or not len(drawing.row):
            return finish(None)
        self._open = opened = PendingSample(plan.step_id, finish, partial(_forced, plan))
        return opened

    def _fill_drawing(self, views: dict[str, np.ndarray], drawing: Drawing, decodes: bool) -> np.ndarray:
        """The parts that say how tokens are drawn; which of the positions report log probabilities, int64."""
        n, slot, parameters = len(drawing.slot), drawing.slot, self._parameters
        if not decodes:
            views["select"][:n] = drawing.token
        views["draw_slot"][:n], views["draw_place"][:n] = slot, drawing.place
        for name in SAMPLED[2:]:
            views[name][:n] = parameters.numbers[name][slot]
        asked = np.flatnonzero(parameters.logprobs[slot] >= 0)
        draws, penalties = parameters.draws[slot], parameters.penalties[slot]
        filters = draws & parameters.filters[slot]
        views["flags"][:] = draws.any(), filters.any(), penalties.any(), len(asked) > 0
        return asked

    def _finish(
        self, plan: StepPlan, drawing: Drawing, given: Forwarded, asked: np.ndarray, masks: Masks | None
    ) -> RunningStep:
        """What comes behind the model: tokens are drawn, and the copy to the host begins."""
        arrays = []
        if len(drawing.row):
            drawn, found = self._steps.draw(self._memory, given, self._masks(drawing, given, masks))
            arrays = [drawn, *(found if len(asked) else ())]
        scored = self._score(plan, given)
        arrays += [array for piece in scored[2] for array in piece] if scored else []
        most = int(self._parameters.logprobs[drawing.slot[asked]].max()) if len(asked) else 0
        errors = {} if self._drafting is None else self._drafting.faults_of(plan)
        told = self._ended(plan)

        def take(host: list[np.ndarray]) -> StepResult:
            result = _result(plan)
            if len(drawing.row):
                _put_drawn(result, plan, drawing, host[0])
                _put_errors(result, drawing, errors)
                if len(asked):
                    result.logprobs = _logprobs(result, drawing, asked, Logprobs(*host[1:5]), most)
            if scored:
                _put_scores(result, scored, host[-4 * len(scored[2]) :])
            return told(result)

        step = RunningStep(plan.step_id, arrays, take)
        if self._drafting is not None:
            first = np.flatnonzero(drawing.offset == 0)
            self._drafting.drawn(step, drawing.slot[first], drawing.place[first], drawing.row[first])
        return step

    def _ended(self, plan: StepPlan) -> Callable[[StepResult], StepResult]:
        """All of the step is queued: what puts into its result what connectors have to tell."""
        put = None if self._transfers is None else self._transfers.ended(plan)

        def told(result: StepResult) -> StepResult:
            if put is not None:
                put(result, [])
            return result

        return told

    def _masks(self, drawing: Drawing, given: Forwarded, masks: Masks | None) -> DeviceMasks | None:
        """Those of a step on the device, with the edited logits; None where no row has any, and none is edited."""
        count = len(given.logits)
        ends = self._parameters.ends_too_early(drawing.slot, drawing.place, count)
        position = drawing.place - self._parameters.num_prompt[drawing.slot]
        edited = self._edits(given.logits, given.drawing, drawing.slot, position)
        if ends is None and edited is given.logits and (masks is None or not len(masks.row)):
            return None
        if ends is None:
            ends = np.zeros((count, self._words), np.uint32)
        allowed = np.full_like(ends, 0xFFFFFFFF)
        if masks is not None:
            nth = np.arange(len(masks.row)) - np.searchsorted(masks.row, masks.row)  # mask of its row
            allowed[np.searchsorted(drawing.row, masks.row) + nth] = masks.bits.view(np.uint32)
        return self._steps.masks(ends, allowed, edited)

    def _put_drafts(self, plan: StepPlan) -> None:
        """Write the drafts of a plan behind their rows' tokens."""
        given = plan.given_drafts
        assert given is not None and plan.num_drafts is not None
        nth, offset = np.nonzero(np.arange(given.tokens.shape[1]) < plan.num_drafts[given.row][:, None])
        row = given.row[nth]
        place = plan.num_computed[row] + 1 + offset
        self._steps.put(self._memory, np.stack((plan.slot_of_row[row], place, given.tokens[nth, offset])))

    def _score(self, plan: StepPlan, given: Forwarded) -> tuple[np.ndarray, np.ndarray, list[Logprobs], int] | None:
        """The log probabilities of the step's prompt tokens that are asked for: rows and positions, int32, of pieces of
        `SCORED`, and the most alternatives; None where there are none."""
        slots = plan.slot_of_row
        asked = self._parameters.prompt_logprobs[slots]
        num_prompt = self._parameters.num_prompt[slots]
        if not ((asked >= 0) & (plan.num_computed + 1 < num_prompt)).any():
            return None
        row = np.repeat(np.arange(plan.num_rows), plan.num_tokens)
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        position = plan.num_computed[row] + np.arange(len(row)) - starts[row] + 1
        index = np.flatnonzero((asked[row] >= 0) & (position < num_prompt[row]))
        pieces = []
        for first in range(0, len(index), SCORED):
            piece = index[first : first + SCORED]
            packed = np.zeros((3, SCORED), np.int32)
            packed[:, : len(piece)] = piece, slots[row[piece]], position[piece]
            pieces.append(self._steps.score(self._memory, given.hidden, packed))
        return row[index].astype(np.int32), position[index].astype(np.int32), pieces, int(asked[row[index]].max())


def _entries(blocks: list[NewBlocks]) -> np.ndarray:
    """int32 [4, n]: the tables, slots, indices and pages of new blocks."""
    columns = [
        np.stack([np.full_like(new.slot, table), new.slot, new.index, new.page]) for table, new in enumerate(blocks)
    ]
    return np.concatenate(columns, axis=1) if columns else np.zeros((4, 0), np.int32)


def _result(plan: StepPlan) -> StepResult:
    tokens: np.ndarray = np.full(plan.num_rows, -1, np.int32)
    if plan.num_drafts is not None:
        tokens = np.full((plan.num_rows, 1 + int(plan.num_drafts.max())), -1, np.int32)
    return StepResult(step_id=plan.step_id, tokens=tokens, num_drafts=plan.num_drafts)


def _put_drawn(result: StepResult, plan: StepPlan, drawing: Drawing, told: np.ndarray) -> None:
    """The tokens that count: of a row up to and with the first that is not the draft behind it."""
    n = len(drawing.row)
    drawn = told[0, :n]
    if plan.num_drafts is None:
        result.tokens[drawing.row] = drawn
        return
    kept = counted(drawing, told[1, :n])
    result.tokens[drawing.row[kept], drawing.offset[kept]] = drawn[kept]


def _put_errors(result: StepResult, drawing: Drawing, errors: dict[int, ErrorParts]) -> None:
    """Rows whose requests end with an error, of those that draw."""
    tokens = result.tokens if result.tokens.ndim == 2 else result.tokens[:, None]
    result.errors = {row: errors[row] for row in drawing.row.tolist() if row in errors} or None
    for row in result.errors or ():
        tokens[row] = -1
        tokens[row, 0] = BROKEN


def counted(drawing: Drawing, agrees: np.ndarray) -> np.ndarray:
    """bool [n]; the draws that count: each whose row's earlier ones all agreed with the drafts behind them."""
    wrong = (agrees == 0).astype(np.int64)
    before = np.cumsum(wrong) - wrong
    first = np.flatnonzero(drawing.offset == 0)
    found: np.ndarray = before == np.repeat(before[first], np.diff(np.append(first, len(wrong))))
    return found


def _logprobs(result: StepResult, drawing: Drawing, asked: np.ndarray, found: Logprobs, most: int) -> LogprobRows:
    """Of the positions that asked and count."""
    tokens = result.tokens if result.tokens.ndim == 2 else result.tokens[:, None]
    asked = asked[tokens[drawing.row[asked], drawing.offset[asked]] != -1]
    chosen, rank, ids, values = (array[asked] for array in found)
    return LogprobRows(
        row=drawing.row[asked].astype(np.int32),
        chosen=chosen,
        rank=rank,
        top_ids=ids[:, :most],
        top_values=values[:, :most],
    )


def _put_scores(
    result: StepResult, scored: tuple[np.ndarray, np.ndarray, list[Logprobs], int], host: list[np.ndarray]
) -> None:
    row, position, _, most = scored
    chosen, rank, ids, values = (np.concatenate(host[column::4])[: len(row)] for column in range(4))
    result.prompt_logprobs = PromptLogprobRows(
        row=row, position=position, chosen=chosen, rank=rank, top_ids=ids[:, :most], top_values=values[:, :most]
    )


def _forced(plan: StepPlan) -> list[list[int]]:
    """The drafts of each row, as its plan brings them."""
    tokens: list[list[int]] = [[] for _ in range(plan.num_rows)]
    if plan.given_drafts is not None and plan.num_drafts is not None:
        for row, forced in zip(plan.given_drafts.row.tolist(), plan.given_drafts.tokens.tolist(), strict=True):
            tokens[row] = forced[: plan.num_drafts[row]]
    return tokens
