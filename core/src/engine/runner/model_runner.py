"""The runner: from a step's plan to its tokens.

A step's way: pages are copied; new slots and pages go into the tables; drafts behind the tokens of rows that want some;
rows into the fixed buffers; token ids, positions and slot mappings from the tables; one attention plan for each KV
group; the model (captured for decode steps where the platform has buckets); logits of the positions that draw; the
sampler, which also writes the drawn tokens where the next step reads them; how many of them count; and the copy back,
which nobody waits for here.

A step whose masks follow stops before the sampler and goes on there when they come (`PendingSample`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.distributed.group import ProcessGroup
from engine.interfaces.executor import StepFuture
from engine.interfaces.model import LayerIterator, Model, State
from engine.interfaces.ops import Ops
from engine.interfaces.platform import CaptureKey, CapturesDrafts, Platform
from engine.runner.attention import AttentionLayers
from engine.runner.buffers import SlotTables, StepBuffers, TokenTypes, copy_pages
from engine.runner.capture import Buckets, DecodeTrial, buckets_of, can_be_tried, padding_of, width_of, widths_of
from engine.runner.drafting import ChosenDrafter, Drafting, StepDrafts
from engine.runner.pooling import StepPooler
from engine.runner.prompt_logprobs import PromptScorer, ScoredPrompts
from engine.runner.results import DraftedStep, FailedStep, PendingSample, RunningStep
from engine.runner.stages import StageLink
from engine.runner.step import Drawing, Step
from engine.sampling.faults import SlotFaults
from engine.sampling.packed import send
from engine.sampling.parameters import SlotParameters
from engine.sampling.processors import Processor, ProcessorChain
from engine.sampling.sampler import SampledMasks, SampledRows, Sampler
from engine.types.kv import NULL_PAGE
from engine.types.plan import Masks, NewBlocks, StepPlan
from engine.types.start import WorkerStart

_NO_ROWS = np.empty(0, np.int64)


class ModelRunner:
    """Computes steps.

    Args:
        start: sizes and limits.
        platform, ops, attention, model: at work; attention is bound to the pool.
        drafter: None where the engine has none; then all drafts come with their plans.
        processors: the logits processors, in their order.
        walk: over the model's layers; None: through all of them.
        capture: whether `capture` finds any buckets.
        skips_padding: whether the platform's replays take the number of rows that count.
        captures_drafts: which steps with drafts are captured as well.
        stages: the ranks of all pipeline stages; None where there is one stage.
    """

    def __init__(
        self,
        start: WorkerStart,
        platform: Platform,
        ops: Ops,
        attention: AttentionLayers,
        model: Model,
        drafter: ChosenDrafter | None = None,
        processors: Sequence[Processor] = (),
        walk: LayerIterator | None = None,
        capture: bool = False,
        skips_padding: bool = False,
        captures_drafts: CapturesDrafts = "never",
        stages: ProcessGroup | None = None,
    ) -> None:
        self._platform = platform
        self._ops = ops
        self._attention = attention
        self._model = model
        self._groups = attention.groups
        self._walk: LayerIterator = _all_layers if walk is None else walk
        self._buckets: Buckets = {}
        if capture:
            widths = widths_of(captures_drafts, 0 if drafter is None else drafter.num_tokens, start.max_model_len)
            self._buckets = buckets_of(platform, start.max_num_seqs, widths)
        self._skips_padding = skips_padding
        self._captures_drafts = captures_drafts
        max_rows = max(start.max_num_seqs, *(rows[-1] for rows in self._buckets.values()), 1)
        self._slots = SlotTables(platform, start.layout, start.max_num_seqs, start.max_model_len)
        padded = [width * rows[-1] for width, rows in self._buckets.items()]
        max_tokens = max(start.max_num_batched_tokens, max_rows, *padded)
        self._buffers = StepBuffers(platform, self._slots, self._groups, max_rows, max_tokens)
        self._draws = start.place.draws
        self._link: StageLink | None = None
        if stages is not None:
            dtype, sizes = getattr(torch, start.dtype), model.state_sizes()
            self._link = StageLink(start.place.stage, stages, sizes, max_tokens, dtype, platform.device)
        self._pooler = None if start.model.generates or not self._draws else StepPooler(platform, model, start.model)
        types = start.model.num_token_types
        self._token_types = TokenTypes(platform, start.max_num_seqs, max_tokens) if types else None
        self._parameters = SlotParameters(start.max_num_seqs, start.model.vocab_size)
        tokens = self._slots.tables.tokens
        self._faults = SlotFaults()
        self._processors = ProcessorChain(processors, platform, tokens, self._faults)
        self._sampler = Sampler(ops, platform, tokens, self._parameters, self._processors)
        self._scorer = PromptScorer(ops, platform, model, tokens, start.model.vocab_size)
        self._drafting = Drafting(drafter, ops, platform, tokens, self._faults)
        self._open: PendingSample | FailedStep | None = None
        self._captured: dict[CaptureKey, Step] = {}
        self._vocab_size = start.model.vocab_size
        self._max_model_len = start.max_model_len
        self._eager = Step(self._buffers.frame(1, 1, 1), [None] * len(self._groups))

    @torch.inference_mode()
    def capture(self) -> tuple[int, ...]:
        """Capture decode steps of every bucket, and those with drafts; once, before the first plan. The attention is
        bound to the pool.

        Returns:
            The buckets of decode steps that are captured: none where nothing can be, or where the platform said that
            one could not.

        Raises ContractError where a step cannot be captured and the platform insists.
        """
        for width in sorted(self._buckets):
            steps = self._capture_width(width)
            if steps is None:  # one form of step for all of a width, so that no row's result depends on their number
                del self._buckets[width]
                if width == 1:
                    self._buckets.clear()
                    break
            else:
                self._captured |= steps
        return self._buckets.get(1, ())

    def _capture_width(self, width: int) -> dict[CaptureKey, Step] | None:
        """The steps of so many tokens a row; None where one cannot be captured."""
        steps = {}
        assert self._attention.pool is not None
        if not can_be_tried(self._attention, width):
            return None
        for bucket in reversed(self._buckets[width]):  # the largest first: where steps share memory, it makes room
            step = Step(self._buffers.frame(bucket, bucket * width, width), [None] * len(self._groups))
            step.select = step.frame.select
            trial = DecodeTrial(
                self._platform,
                self._buffers,
                self._attention,
                step.frame,
                self._vocab_size,
                self._max_model_len,
                partial(self._plan_attention, step, keep=True),
                step.outputs,
                step.replace,
                () if self._link is None else tuple(self._link.state(bucket * width).values()),
            )
            forward = partial(self._forward, step)
            step.run = self._platform.capture(forward, CaptureKey(bucket, width), trial.trial)
            if step.run is forward:
                return None
            steps[CaptureKey(bucket, width)] = step
        return steps

    @torch.inference_mode()
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

    def drafts(self, step_id: int) -> list[list[int]]:
        """Those of each row of the step whose masks follow; none where the worker does not draw.

        Raises the error of its launch.
        """
        step = self._open
        if step is None and not self._draws:
            return []
        if isinstance(step, FailedStep):
            step.result()
        assert isinstance(step, PendingSample) and step.step_id == step_id
        return step.drafts()

    def flush(self) -> None:
        """Wait until the next pipeline stage has what was sent to it: see `StageLink.flush`."""
        if self._link is not None:
            self._link.flush()

    @torch.inference_mode()
    def sample(self, step_id: int, masks: Masks) -> None:
        """Go on with the step whose masks follow; no step waits for them where the worker does not draw. An error is
        its future's, as is that of its launch."""
        step = self._open
        self._open = None
        if self._draws and not isinstance(step, FailedStep):
            assert step is not None and step.step_id == step_id
            step.sample(masks)

    def _execute(self, plan: StepPlan) -> StepFuture:
        if plan.copies is not None:
            assert self._attention.pool is not None
            copy_pages(self._platform, self._attention.pool, plan.copies)
        if plan.left_slots is not None:
            self._drafting.leave(plan.left_slots)
        for new in plan.new_slots:
            self._faults.enter(new.slot)
            self._drafting.enter(new)
            self._parameters.enter(new)
            self._processors.enter(new)
            self._scorer.enter(new)
            if self._pooler is not None:
                self._pooler.enter(new)
            if self._token_types is not None:
                self._token_types.enter(new)
        if plan.known is not None:
            self._slots.take_known(plan.known) if not self._draws else self._processors.take_host_tokens(plan.known)
        self._slots.enter(plan)
        blocks = plan.new_blocks
        if blocks and (plan.num_drafts is not None or not self._room_for(blocks)):
            self._place_blocks(blocks)  # drafters may read them
            blocks = []
        drafts: StepDrafts | None = None
        if plan.num_drafts is not None:
            plan, drafts = self._drafting.propose(plan)
        rows = np.flatnonzero(plan.samples) if self._draws else _NO_ROWS
        if not self._draws:
            drafts = None  # they are in the table
        if not plan.num_rows:
            if blocks:
                self._place_blocks(blocks)
            return RunningStep(plan, rows, None)
        step, captured = self._step_of(plan, drafts)
        sampled = self._prepare(step, plan, captured, Drawing.of(plan, rows, drafts), blocks)
        if step.run is None:
            step.run = self._platform.capture(partial(self._forward, step), None)
        if self._link is not None:
            self._link.receive(plan.total_tokens)
        if captured and self._skips_padding:
            step.run(plan.num_rows)
        else:
            step.run()
        if self._link is not None and step.left is not None:
            self._link.send(step.left, plan.total_tokens, keep=captured)
        if self._pooler is not None:
            assert step.hidden is not None
            return self._pooler.pool(step.hidden, plan)
        scores = self._score_prompts(step, plan)
        if not len(rows):
            fetch = None if scores is None else self._platform.to_host(scores.tensors)
            return RunningStep(plan, rows, fetch, None, scores)
        draw: Callable[[Masks | None], StepFuture]
        if drafts is not None:
            draw = partial(self._sample_drafted, step, plan, sampled, drafts, scores)
        else:
            draw = partial(self._sample, step, plan, sampled, rows, scores)
        if not plan.masks_follow:
            return draw(None)
        told = (lambda: [[] for _ in range(plan.num_rows)]) if drafts is None else drafts.told
        self._open = opened = PendingSample(plan.step_id, draw, told)  # buffers stay as they are until the next launch
        return opened

    def _step_of(self, plan: StepPlan, drafts: StepDrafts | None) -> tuple[Step, bool]:
        """The captured step that computes a plan; else the eager one, and False."""
        width = self._width(plan, drafts)
        buckets = self._buckets.get(width, ())
        if not buckets or plan.num_rows > buckets[-1]:
            return self._eager_step(plan), False
        return self._captured[CaptureKey(buckets[bisect_left(buckets, plan.num_rows)], width)], True

    def _width(self, plan: StepPlan, drafts: StepDrafts | None) -> int:
        """The tokens of a row in the captured steps that can compute a plan; 0: none can."""
        if plan.num_decodes == plan.num_rows:
            return 1
        if drafts is None or len(self._buckets) < 2:
            return 0
        return width_of(
            plan, drafts.positions.num_drafts, self._captures_drafts, tuple(self._buckets), self._max_model_len
        )

    def _eager_step(self, plan: StepPlan) -> Step:
        """The step that is not captured; its views are made anew only when the shape is another than the last one's."""
        step, num_rows = self._eager, plan.num_rows
        num_tokens, each = (num_rows, 1) if plan.num_decodes == num_rows else (plan.total_tokens, 0)
        if (step.frame.num_rows, step.frame.num_tokens, step.frame.tokens_per_row) != (num_rows, num_tokens, each):
            step.frame = self._buffers.frame(num_rows, num_tokens, each)
        return step

    def _prepare(
        self, step: Step, plan: StepPlan, captured: bool, drawing: Drawing, blocks: Sequence[NewBlocks]
    ) -> SampledRows:
        """Send what the step needs, fill the inputs and plan attention; what the sampler is to be told."""
        rows = SampledRows(drawing.slot, drawing.num_tokens)
        entries = [array for new in blocks if len(new.slot) for array in (new.slot, new.index, new.page)]
        places = self._sampler.places(rows) if len(rows.slot) else None
        each = step.frame.tokens_per_row
        sent = self._buffers.fill(step.frame, plan, places, drawing.select(each), padding_of(plan, each), entries)
        if entries:
            self._slots.place(sent.blocks, [len(new.slot) for new in blocks])
        inputs = step.frame.inputs
        self._ops.prepare_inputs(self._slots.tables, inputs)
        if each > 1:
            step.frame.kv_index.copy_(inputs.positions)
        if len(sent.padding):  # where the row's next pages would be, others' may be by now: its table is not to be read
            step.frame.kv_index.index_fill_(0, sent.padding, -1)
            for slot_mapping in inputs.slot_mappings:
                slot_mapping.index_fill_(0, sent.padding, NULL_PAGE)
        if self._token_types is not None:
            step.token_types = self._token_types.fill(plan, step.frame.num_tokens)
        self._plan_attention(step, captured)
        step.select = sent.select
        return rows._replace(places=sent.places)

    def _room_for(self, blocks: Sequence[NewBlocks]) -> bool:
        return self._buffers.room_for(sum(len(new.slot) for new in blocks))

    def _place_blocks(self, blocks: Sequence[NewBlocks]) -> None:
        """Write them into the tables at once."""
        if not any(len(new.slot) for new in blocks):
            return
        entries = [array for new in blocks for array in (new.slot, new.index, new.page)]
        (sent,) = send(self._platform, np.concatenate(entries))
        self._slots.place(sent, [len(new.slot) for new in blocks])

    def _plan_attention(self, step: Step, keep: bool) -> None:
        """One plan for each group; `keep` refills those of the step before."""
        for group, batch in zip(self._groups, step.frame.batches, strict=True):
            earlier = step.plans[group.index] if keep else None
            step.plans[group.index] = self._attention.backend(group).plan(batch, group, earlier)
        self._attention.plans[:] = step.plans

    def _forward(self, step: Step) -> None:
        """The part of a step that is captured: the model's own work, through ops and attention only."""
        inputs = step.frame.inputs
        state = State(token_ids=inputs.token_ids, positions=inputs.positions)
        if step.token_types is not None:
            state["token_type_ids"] = step.token_types
        if self._link is not None:
            state.update(self._link.state(step.frame.num_tokens))
        step.hidden = hidden = self._model.forward(state, self._walk)
        if hidden is None:
            assert self._link is not None
            step.left = self._link.left(state)
        elif step.select is None:
            step.logits, step.broken = self._ops.check_logits(self._model.logits(hidden))
        elif len(step.select):
            logits = self._model.logits(self._ops.gather_rows(hidden, step.select))
            step.logits, step.broken = self._ops.check_logits(logits)

    def _score_prompts(self, step: Step, plan: StepPlan) -> ScoredPrompts | None:
        """The log probabilities of the step's prompt tokens, where they are asked for."""
        wanted = self._scorer.wanted(plan) if self._draws else None
        if wanted is None:
            return None
        assert step.hidden is not None
        return self._scorer.score(step.hidden, plan, wanted)

    def _sample(
        self,
        step: Step,
        plan: StepPlan,
        sampled: SampledRows,
        rows: np.ndarray,
        scores: ScoredPrompts | None,
        masks: Masks | None,
    ) -> StepFuture:
        """Draw the rows' tokens and start their copy to the host."""
        assert step.logits is not None and step.broken is not None
        logits, broken = step.logits[: len(rows)], step.broken[: len(rows)]  # a bucket's padding rows come last
        tokens, logprobs = self._sampler(logits, broken, sampled, masks=_placed(masks, rows))
        tensors: tuple[torch.Tensor, ...] = (tokens,)
        logprob_rows = None
        if logprobs is not None:
            tensors += (logprobs.chosen, logprobs.rank, logprobs.top_ids, logprobs.top_values)
            logprob_rows = rows[logprobs.places].astype(np.int32)
        if scores is not None:
            tensors += scores.tensors
        fetch = self._platform.to_host(tensors)
        return RunningStep(plan, rows, fetch, logprob_rows, scores, self._faults.of_rows(plan))

    def _sample_drafted(
        self,
        step: Step,
        plan: StepPlan,
        sampled: SampledRows,
        drafts: StepDrafts,
        scores: ScoredPrompts | None,
        masks: Masks | None,
    ) -> StepFuture:
        """As `_sample`, at all positions of rows with drafts; and how many of the draws count."""
        assert step.logits is not None and step.broken is not None
        at = drafts.positions
        logits, broken = step.logits[: len(at.row)], step.broken[: len(at.row)]
        rejected = drafts.sampled if self._drafting.rejects else None
        tokens, logprobs = self._sampler(logits, broken, sampled, rejected, _placed(masks, at.row))
        counts = self._drafting.verify(drafts, tokens)
        tensors: tuple[torch.Tensor, ...] = (tokens, counts)
        places = None
        if logprobs is not None:
            places, *values = logprobs
            tensors += tuple(values)
        if scores is not None:
            tensors += scores.tensors
        return DraftedStep(plan, at, self._platform.to_host(tensors), places, scores, self._faults.of_rows(plan))


def _all_layers(layers: Iterable[Any], state: State) -> Iterator[Any]:
    """Every layer, in order, with nobody looking on: the step stays one captured unit."""
    return iter(layers)


def _placed(masks: Masks | None, row: np.ndarray) -> SampledMasks | None:
    """The masks by their places among the sampled positions, whose rows of the plan, ascending, are `row`."""
    if masks is None:
        return None
    nth = np.arange(len(masks.row)) - np.searchsorted(masks.row, masks.row)  # mask of its row
    bits = masks.bits if masks.bits.flags.writeable else masks.bits.copy()  # torch takes no array that only can be read
    return SampledMasks(np.searchsorted(row, masks.row) + nth, bits)
