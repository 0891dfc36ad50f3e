"""Where a step's rows draw tokens, and the drawing: with drafts at several positions of a row, without at its last."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from engine.interfaces.ops import Ops
from engine.interfaces.platform import Platform
from engine.interfaces.step import StepOutput, StepPart
from engine.runner.drafting import Drafting, StepDrafts
from engine.runner.results import Put
from engine.runner.step import Drawing
from engine.sampling.faults import SlotFaults
from engine.sampling.processors import ProcessorChain
from engine.sampling.sampler import SampledMasks, SampledRows, Sampler, SlotParameters
from engine.types.plan import ErrorParts, LogprobRows, Masks, NewSlot, StepPlan, StepResult
from engine.types.start import WorkerStart


class Draws(StepPart):
    """Draws the tokens of steps.

    Args:
        start: whether this worker draws at all; sizes.
        ops, platform: the worker's.
        tokens: int32 [max_num_seqs + 1, max_model_len + 1]; the device's table of tokens.
        parameters: of every slot.
        processors: edit the logits.
        drafting: has put the drafts of a plan that has some into the table.
        faults: of slots; whose rows draw `BROKEN`.

    Attributes:
        parameters: as given.
    """

    def __init__(
        self,
        start: WorkerStart,
        ops: Ops,
        platform: Platform,
        tokens: torch.Tensor,
        parameters: SlotParameters,
        processors: ProcessorChain,
        drafting: Drafting,
        faults: SlotFaults,
    ) -> None:
        self._ops = ops
        self._draws = start.place.draws
        self._tokens = tokens
        self._drafting = drafting
        self._faults = faults
        self._processors = processors
        self.parameters = parameters
        self._sampler = Sampler(ops, platform, tokens, parameters, processors)

    def enter(self, new: NewSlot) -> None:
        self._faults.enter(new.slot)
        self.parameters.enter(new)

    def of(self, plan: StepPlan) -> Drawing:
        """Where a plan draws; nowhere where this worker does not."""
        if plan.num_drafts is not None and self._draws:
            assert self._drafting.step is not None
            return self._drafting.step.drawing
        return Drawing.of(plan, np.flatnonzero(plan.samples if self._draws else ()))

    def plain(self, plan: StepPlan) -> bool:
        """Whether each row only draws a token, from its logits as they come, and its result holds nothing else."""
        slots = plan.slot_of_row
        if plan.num_drafts is not None or plan.masks_follow or self._faults.among(slots) is not None:
            return False
        return bool((plan.samples & self.parameters.plain[slots]).all()) and not self._processors.used_by(slots).any()

    @staticmethod
    def put(plan: StepPlan) -> Put:
        """What puts the tokens of a plain plan's rows into its result."""
        return partial(_put_tokens, np.arange(plan.num_rows), None, None)

    def places(self, drawing: Drawing) -> np.ndarray | None:
        """What travels with the step for `draw`: see `engine.sampling.sampler.SampledRows.places`."""
        return self._sampler.places(SampledRows(drawing.slot, drawing.num_tokens)) if len(drawing.slot) else None

    def hide(self, plan: StepPlan, select: torch.Tensor | None, hidden: torch.Tensor, positions: torch.Tensor) -> bool:
        """Whether drafts branch: then the nodes of their trees, which stand one behind the other and see few of these,
        get in `hidden` what they do not see, and in `positions` their depth. select: where the step draws."""
        drafts = None if plan.num_drafts is None else self._drafting.step
        trees = None if drafts is None else drafts.trees
        if trees is None:
            return False
        if select is not None:
            tokens = select[: len(trees.hidden)]
            hidden.index_copy_(0, tokens, trees.hidden)
            positions.index_add_(0, tokens, trees.beyond, alpha=-1)
        return True

    def drafts(self, plan: StepPlan) -> list[list[int]]:
        """Those of each row, on the host. Waits for their copy."""
        tokens: list[list[int]] = [[] for _ in range(plan.num_rows)]
        if plan.num_drafts is not None:
            step = self._drafting.step
            assert step is not None and step.fetch is not None
            (found,) = step.fetch.wait()
            for row, of_row in zip(step.place.tolist(), found.tolist(), strict=True):
                tokens[row] = of_row[: plan.num_drafts[row]]
        return tokens

    def draw(
        self,
        plan: StepPlan,
        drawing: Drawing,
        places: torch.Tensor | None,
        logits: torch.Tensor,
        masks: Masks | None,
    ) -> tuple[StepOutput, torch.Tensor | None, list[torch.Tensor] | None]:
        """Draw the tokens.

        Args:
            places: as `places` says, on the device.
            logits: [n or more, V], the model's, of the positions, in order.
            masks: of constrained rows; None where none follow.

        Returns:
            The tokens, and with drafts how many of them count for each row that draws: int32 [m], device; and which
            they are, where drafts branch: see `StepTrees.walk`.
        """
        n, rows = len(drawing.row), SampledRows(drawing.slot, drawing.num_tokens, places)
        drafts = None if plan.num_drafts is None else self._drafting.step
        trees = None if drafts is None else drafts.trees
        rejected = None if drafts is None or trees is not None or not self._drafting.rejects else drafts.sampled
        drawn, logprobs = self._sampler(logits[:n], rows, rejected, _placed(masks, drawing.row))
        tensors: tuple[torch.Tensor, ...] = (drawn,)
        counts, asked, walked = None, None, None
        if drafts is not None and trees is not None:
            counts, *walked = trees.walk(self._ops, drawn, drafts.sampled, drafts.start, self._tokens)
            tensors = (drawn, counts, walked[0])
        elif drafts is not None:
            counts = self._ops.verify(drawn, drafts.sampled.tokens, drafts.start)
            tensors = (drawn, counts)
        if logprobs is not None:
            asked, *values = logprobs
            tensors += tuple(values)
        put = partial(_put_tokens, drawing.row) if drafts is None else partial(_put_drafted, plan, drafts)
        return StepOutput(tensors, partial(put, asked, self._faults.of_rows(plan))), counts, walked


def _put_tokens(
    rows: np.ndarray,
    asked: np.ndarray | None,
    errors: dict[int, ErrorParts] | None,
    result: StepResult,
    arrays: list[np.ndarray],
) -> None:
    """One token for each of these rows; of those of them that asked, log probabilities."""
    drawn, *values = arrays
    result.tokens[rows] = drawn
    result.errors = errors
    if asked is not None:
        result.logprobs = _logprobs(rows[asked], values)


def _put_drafted(
    plan: StepPlan,
    drafts: StepDrafts,
    asked: np.ndarray | None,
    errors: dict[int, ErrorParts] | None,
    result: StepResult,
    arrays: list[np.ndarray],
) -> None:
    """The tokens of the positions that draw, as many of each row as count."""
    assert plan.num_drafts is not None
    drawn, counts, *values = arrays
    row, offset = drafts.drawing.row, drafts.offset
    given = np.zeros(plan.num_rows, np.int32)
    given[plan.samples] = counts
    counted = offset < given[row]
    if drafts.trees is not None:
        path, *values = values
        counted = np.zeros(len(row), bool)
        counted[path] = True
    result.tokens = np.full((plan.num_rows, 1 + int(plan.num_drafts.max())), -1, np.int32)
    result.tokens[row[counted], offset[counted]] = drawn[counted]
    result.num_drafts = plan.num_drafts
    result.errors = errors
    if asked is not None:
        kept = counted[asked]
        result.logprobs = _logprobs(row[asked][kept], [array[kept] for array in values])


def _logprobs(row: np.ndarray, values: list[np.ndarray]) -> LogprobRows:
    chosen, rank, top_ids, top_values = values
    return LogprobRows(row=row.astype(np.int32), chosen=chosen, rank=rank, top_ids=top_ids, top_values=top_values)


def _placed(masks: Masks | None, row: np.ndarray) -> SampledMasks | None:
    """The masks by their places among the sampled positions, whose rows of the plan, ascending, are `row`."""
    if masks is None:
        return None
    nth = np.arange(len(masks.row)) - np.searchsorted(masks.row, masks.row)  # mask of its row
    bits = masks.bits if masks.bits.flags.writeable else masks.bits.copy()  # torch takes no array that only can be read
    return SampledMasks(np.searchsorted(row, masks.row) + nth, bits)
