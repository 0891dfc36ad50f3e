"""The runner: from a step's plan to its tokens.

A step's way: requests leave and enter slots; parts begin, which may copy pages in or put drafts into the table of
tokens; pages are copied; rows go into the fixed buffers; token ids, positions and slot mappings come from the tables;
one attention plan for each KV group; the model (captured for decode steps where the platform has buckets); logits of
the positions that draw; the sampler, which also writes the drawn tokens where the next step reads them; what parts make
of the step; and the copy back, which nobody waits for here.

A step whose masks follow stops before the sampler and goes on there when they come (`PendingSample`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.interfaces.executor import StepFuture
from engine.interfaces.model import LayerIterator, State
from engine.interfaces.platform import CaptureKey, CapturesDrafts, Fetch, Trial
from engine.interfaces.step import LayerListener, StepPart, WholeSteps
from engine.plugin.loading import brought
from engine.runner.assemble import Assembly, step_parts
from engine.runner.buffers import SlotTables, StepBuffers, copy_pages
from engine.runner.capture import DecodeTrial, buckets_of, decodes, padding_of, width_of, widths_of
from engine.runner.results import FailedStep, PendingSample, RunningStep
from engine.runner.step import Drawing, LaunchedStep, Step
from engine.runner.walk import StepWalk, StreamRecorder, View
from engine.sampling.packed import send
from engine.types.kv import NULL_PAGE
from engine.types.plan import Masks, NewBlocks, StepPlan
from engine.types.start import WorkerStart


class ModelRunner:
    """Computes steps.

    Args:
        start: sizes and limits.
        built: what computes; its attention is bound to the pool.
        walk: over the model's layers; None: through all of them.
        profiles: it runs one largest step, before the pool is known: nothing is captured, and drafter, processors and
            connectors have no part in it.
    """

    def __init__(
        self, start: WorkerStart, built: Assembly, walk: LayerIterator | None = None, profiles: bool = False
    ) -> None:
        self._platform = platform = built.platform
        self._ops = built.ops
        self._attention = built.attention
        self._model = built.model
        self._groups = built.attention.stepped
        self._walk: LayerIterator = StepWalk() if walk is None else walk
        self._first_layer = start.place.stage.start
        self._adapted = nullcontext if built.adapters is None else built.adapters.at
        self._buckets: dict[int, tuple[int, ...]] = {}
        self._captures_drafts: CapturesDrafts = "never"
        if built.not_captured == () and not profiles:
            drafter, attends = built.drafter, built.attention.captures
            if drafter is not None and attends("uniform", "any"):
                self._captures_drafts = built.card.captures_drafts
            widths = widths_of(self._captures_drafts, 0 if drafter is None else drafter.num_tokens, start.max_model_len)
            mixed = built.card.captures_mixed and drafter is None and attends("any")
            self._buckets = buckets_of(platform, start.max_num_seqs, (0, *widths) if mixed else widths)
        self._skips_padding = built.card.skips_padding
        self._max_rows = start.max_num_seqs
        max_rows = max(start.max_num_seqs, *(rows[-1] for width, rows in self._buckets.items() if width), 1)
        self._slots = SlotTables(platform, start.layout, start.max_num_seqs, start.max_model_len)
        padded = [(width or 1) * rows[-1] for width, rows in self._buckets.items()]
        max_tokens = max(start.max_num_batched_tokens, max_rows, *padded)
        share = start.place.cp_rank, start.place.cp_size
        self._buffers = StepBuffers(platform, self._slots, self._groups, max_rows, max_tokens, share)
        if built.drafter is not None and built.drafter.branches:
            self._buffers.hidden = torch.zeros(max_tokens, dtype=torch.int64, device=platform.device)
        self._draws, parts = step_parts(start, built, self._slots, max_tokens, profiles)
        self._is_last = start.place.draws
        self._whole: WholeSteps | None = None
        if (whole_steps := getattr(platform, "whole_steps", None)) is not None:
            self._whole = whole_steps(self._ops, self._slots.tables, self._draws.parameters, built.not_whole())
        self._parts = parts
        self._leave = [part.leave for part in parts if _has(part, "leave")]
        self._enter = [part.enter for part in parts if _has(part, "enter")]
        self._begin = [part.begin for part in parts if _has(part, "begin")]
        self._inputs = [part.inputs for part in parts if _has(part, "inputs")]
        self._launched = [part for part in parts if _has(part, "launched")]
        listeners = [listener for part in parts for listener in part.listeners()]
        listeners += [StreamRecorder(self._ops, built.streams)] if built.streams else []
        self._listeners = [listener for listener in listeners if listener.captured]
        self._looking_on = [listener for listener in listeners if not listener.captured]
        self._variant = tuple(type(listener).__name__ for listener in self._listeners)
        self._at_work: list[StepPart] = []
        self._has_begun = False
        self._link: Any = None
        if (stages := built.groups.get("pp")) is not None:
            stage, dtype, sizes = start.place.stage, getattr(torch, start.dtype), dict(built.model.state_sizes())
            sizes |= {_stream(layer): start.model.hidden_size for layer in built.streams if layer < stage.start}
            own = [_stream(layer) for layer in built.streams if layer in stage.layers(start.model.num_layers)]
            made = brought("stage_link", "compute in stages")
            self._link = made(stage, stages, sizes, max_tokens, dtype, platform.device, own)
        self._earlier = [layer for layer in built.streams if layer < self._first_layer]
        self._cores = built.groups.get("dp")
        self._nowhere = torch.empty(0, dtype=torch.int64, device=platform.device)
        self._open: PendingSample | FailedStep | None = None
        self._captured: dict[CaptureKey, Step] = {}
        self._vocab_size = start.model.vocab_size
        self._max_model_len = start.max_model_len
        self._eager = Step(self._buffers.frame(1, 1, 1), [None] * len(self._groups))

    @torch.inference_mode()
    def capture(self) -> tuple[int, ...]:
        """Capture decode steps of every bucket, those with drafts, and those with prompts; once, before the first plan.
        The attention is bound to the pool.

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
        for part in self._parts:
            part.capture()
        return self._buckets.get(1, ())

    def _capture_width(self, width: int) -> dict[CaptureKey, Step] | None:
        """The steps of so many tokens a row; None where one cannot be captured."""
        steps = {}
        assert self._attention.pool is not None
        if not DecodeTrial.fits(self._attention, width or min(self._buckets[0][-1], self._max_model_len)):
            return None
        for bucket in reversed(self._buckets[width]):  # the largest first: where steps share memory, it makes room
            rows = bucket if width else min((bucket + 1) // 2, self._max_rows)
            frame = self._buffers.frame(rows, bucket * (width or 1), width, any_rows=not width)
            step = Step(frame, [None] * len(self._groups), select=frame.select, listeners=self._listeners)
            trial = DecodeTrial(
                self._platform,
                self._buffers,
                self._attention,
                step,
                self._vocab_size,
                self._max_model_len,
                partial(self._plan_attention, step, keep=True),
                () if self._link is None else tuple(self._link.state(frame.num_tokens).values()),
            )
            self._fill_more(step, decodes(np.zeros(rows, np.int64), trial.counts(0)))
            forward = partial(self._forward, step)
            key = CaptureKey(bucket, width, variant=self._variant)
            step.run = self._platform.capture(forward, key, trial.trial)
            if step.run is forward:
                return None
            steps[key] = step
            if self._whole is not None and width == 1:
                step.whole = self._capture_whole(self._whole, step)
        return steps

    def _capture_whole(self, whole: WholeSteps, step: Step) -> Callable[[int], Fetch] | None:
        """The same step once more, with what is launched before and behind it: what it leaves is its own."""
        own, pool = Step(step.frame, step.plans, step.more, listeners=self._listeners), self._attention.pool
        assert pool is not None

        def prepare(number: int) -> None:
            pool[NULL_PAGE] = 0

        def compute() -> None:
            self._ops.prepare_inputs(self._slots.tables, own.frame.inputs)
            self._plan_attention(own, keep=True)
            self._forward(own)

        return whole.capture(own.frame.inputs, own.frame.news, compute, Trial(prepare, own.outputs, own.replace))

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
        if step is None and not self._is_last:
            return []
        if isinstance(step, FailedStep):
            step.result()
        assert isinstance(step, PendingSample) and step.step_id == step_id
        return step.drafts()

    def flush(self) -> None:
        """Wait until the next pipeline stage has what was sent to it: see `engine_kit.stage_link`."""
        if self._link is not None:
            self._link.flush()

    @torch.inference_mode()
    def sample(self, step_id: int, masks: Masks) -> None:
        """Go on with the step whose masks follow; no step waits for them where the worker does not draw. An error is
        its future's, as is that of its launch."""
        step = self._open
        self._open = None
        if self._is_last and not isinstance(step, FailedStep):
            assert step is not None and step.step_id == step_id
            step.sample(masks)

    def _execute(self, plan: StepPlan) -> StepFuture:
        if plan.left_slots is not None:
            for leave in self._leave:
                leave(plan.left_slots)
        for new in plan.new_slots:
            for enter in self._enter:
                enter(new)
        if plan.known is not None and not self._is_last:
            self._slots.take_known(plan.known)
        self._slots.enter(plan)
        blocks = plan.new_blocks
        if blocks and (plan.num_drafts is not None or not self._buffers.room_for(sum(len(new.slot) for new in blocks))):
            self._place_blocks(blocks)  # drafters may read them
            blocks = []
        begins = plan.num_drafts is not None or plan.known is not None or plan.sections is not None
        if begins:
            for begin in self._begin:
                plan = begin(plan)
        if begins or self._has_begun or plan.new_slots or plan.idle_tokens:
            self._at_work = [part for part in self._launched if not part.steady()]
        self._has_begun = begins
        if plan.copies is not None:
            assert self._attention.pool is not None
            copy_pages(self._platform, self._attention.pool, plan.copies)
        if not plan.num_rows and not plan.idle_tokens:
            if blocks:
                self._place_blocks(blocks)
            return self._finish(plan, self._eager, None, None, None)
        heard = [listener for listener in self._looking_on if listener.hears(plan)] if self._looking_on else []
        step, captured = self._step_of(plan, heard)
        if step.whole is not None and not self._at_work and self._draws.plain(plan):
            self._prepare(step, plan, captured, None, blocks)
            return RunningStep(plan, [(1, self._draws.put(plan))], step.whole(plan.num_rows))
        drawing = self._draws.of(plan)
        places = self._prepare(step, plan, captured, drawing, blocks)
        if step.run is None:
            step.run = self._platform.capture(partial(self._forward, step), None)
        num_tokens = plan.total_tokens or plan.idle_tokens
        if self._link is not None:
            self._link.receive(num_tokens)
        if captured and self._skips_padding:
            step.run(plan.num_rows if plan.lockstep is None else step.frame.num_rows)
        else:
            step.run()
        if self._link is not None and step.left is not None:
            self._link.send(step.left, num_tokens, keep=captured)
        if not plan.masks_follow or not len(drawing.row):
            return self._finish(plan, step, drawing, places, None)
        finish = partial(self._finish, plan, step, drawing, places)
        # The buffers stay as they are until the next launch.
        self._open = opened = PendingSample(plan.step_id, finish, partial(self._draws.drafts, plan))
        return opened

    def _finish(
        self, plan: StepPlan, step: Step, drawing: Drawing | None, places: torch.Tensor | None, masks: Masks | None
    ) -> RunningStep:
        """What comes behind the model: tokens are drawn, parts see the step, and the copy to the host begins."""
        outputs, counts, walked, ends = [], None, None, None
        if drawing is not None and len(drawing.row):
            assert step.logits is not None
            drawn, counts, walked = self._draws.draw(plan, drawing, places, step.logits, masks)
            outputs.append(drawn)
        if counts is not None:
            self._attention.restore(counts)
        if walked is not None:
            assert step.select is not None
            ends, moves = step.select[walked[0][:, -1]], step.select[walked[1]]
        if self._at_work:
            hidden = step.hidden if plan.num_rows else None
            streams = step.streams
            if self._earlier:  # those of the stages before
                received = self._link.state(step.frame.num_tokens)
                streams = streams | {layer: received[_stream(layer)] for layer in self._earlier}
            launched = LaunchedStep(plan, hidden, streams, step.frame, counts, ends, self._slots, self._platform)
            found = [part.launched(launched) for part in self._at_work]
            outputs += [output for output in found if output is not None]
        if walked is not None:
            self._attention.move(step.frame.batches, *moves)
        tensors = tuple(tensor for output in outputs for tensor in output.tensors)
        fetch = self._platform.to_host(tensors) if tensors else None
        return RunningStep(plan, [(len(output.tensors), output.put) for output in outputs], fetch)

    def _step_of(self, plan: StepPlan, heard: Sequence[LayerListener]) -> tuple[Step, bool]:
        """The captured step that computes a plan; else the eager one, and False. The latter for those who look on at
        this step alone."""
        width = self._width(plan)
        size = plan.num_rows if width else max(plan.total_tokens, 2 * plan.num_rows)
        more = not width and plan.num_drafts is not None  # than the rows' last tokens may draw
        buckets = () if more else self._buckets.get(width, ())
        if plan.lockstep is not None and self._cores is not None:
            # Replayed on all ranks of all cores, with as many rows on each, or on none.
            size, buckets = int(plan.lockstep.max()), self._buckets.get(1, ()) if plan.decodes else ()
            replays = buckets and size <= buckets[-1]
            told = [buckets[bisect_left(buckets, size)]] * len(plan.lockstep) if replays else plan.lockstep.tolist()
            self._cores.tokens = told
        if heard or not buckets or size > buckets[-1]:
            step = self._eager_step(plan)
            if self._listeners or self._looking_on:
                step.listeners = [*self._listeners, *heard]
                step.plan = plan
                step.streams = {}
            return step, False
        key = CaptureKey(buckets[bisect_left(buckets, size)], width, variant=self._variant)
        return self._captured[key], True

    def _width(self, plan: StepPlan) -> int:
        """The tokens of a row in the captured steps that can compute a plan; 0: at most those of any rows can."""
        if plan.num_decodes == plan.num_rows:
            return 1
        if plan.num_drafts is None or not self._is_last or len(self._buckets) < 2:
            return 0
        return width_of(plan, plan.num_drafts, self._captures_drafts, tuple(self._buckets), self._max_model_len)

    def _eager_step(self, plan: StepPlan) -> Step:
        """The step that is not captured; its views are made anew only when the shape is another than the last one's."""
        step, num_rows = self._eager, plan.num_rows or plan.idle_tokens
        num_tokens, each = (num_rows, 1) if plan.num_decodes == plan.num_rows else (plan.total_tokens, 0)
        if (step.frame.num_rows, step.frame.num_tokens, step.frame.tokens_per_row) != (num_rows, num_tokens, each):
            step.frame = self._buffers.frame(num_rows, num_tokens, each)
        return step

    def _prepare(
        self, step: Step, plan: StepPlan, captured: bool, drawing: Drawing | None, blocks: Sequence[NewBlocks]
    ) -> torch.Tensor | None:
        """Send what the step needs, fill the inputs and plan attention; what `Draws.draw` is to be told. Without
        `drawing` the launch does all but the sending by itself."""
        inputs, each = step.frame.inputs, step.frame.tokens_per_row
        if self._inputs:
            self._fill_more(step, plan)
        if drawing is None:
            self._buffers.fill(step.frame, plan, [self._slots.news(blocks)])
            return None
        entries, more = self._slots.entries(blocks), (drawing.select(each), padding_of(plan, each))
        sent = self._buffers.fill(step.frame, plan, entries, self._draws.places(drawing), *more)
        if entries:
            self._slots.place(sent.blocks, [len(new.slot) for new in blocks])
        self._ops.prepare_inputs(self._slots.tables, inputs)
        self._buffers.place_keys(step.frame)
        if (hidden := self._buffers.hidden) is not None and each != 1:
            hidden.zero_()
            branches = self._draws.hide(plan, sent.select, hidden, inputs.positions)
            for batch in step.frame.batches:
                batch.hidden = hidden[: len(batch.kv_index)] if captured or branches else None
        if len(sent.padding):  # where the row's next pages would be, others' may be by now: its table is not to be read
            step.frame.kv_index.index_fill_(0, sent.padding, -1)
            for slot_mapping in inputs.slot_mappings:
                slot_mapping.index_fill_(0, sent.padding, NULL_PAGE)
        self._attention.begin(plan)
        self._plan_attention(step, captured)
        step.select = sent.select if plan.num_rows or captured else self._nowhere
        return sent.places

    def _fill_more(self, step: Step, plan: StepPlan) -> None:
        """What parts add to the model's state."""
        frame = step.frame
        filled = [inputs(plan, frame.num_tokens, frame.tokens_per_row) for inputs in self._inputs]
        step.more = {name: tensor for more in filled for name, tensor in more.items()}

    def _place_blocks(self, blocks: Sequence[NewBlocks]) -> None:
        """Write them into the tables at once."""
        if not any(len(new.slot) for new in blocks):
            return
        (sent,) = send(self._platform, np.concatenate(self._slots.entries(blocks)))
        self._slots.place(sent, [len(new.slot) for new in blocks])

    def _plan_attention(self, step: Step, keep: bool) -> None:
        """One plan for each group; `keep` refills those of the step before."""
        for group, batch in zip(self._groups, step.frame.batches, strict=True):
            earlier = step.plans[group.index] if keep else None
            step.plans[group.index] = self._attention.backend(group).plan(batch, group, earlier)
        self._attention.plans[: len(step.plans)] = step.plans

    def _forward(self, step: Step) -> None:
        """The part of a step that is captured: the model's own work, through ops and attention only."""
        inputs = step.frame.inputs
        state = State(token_ids=inputs.token_ids, positions=inputs.positions)
        if step.more:
            state.update(step.more)
        if self._link is not None:
            state.update(self._link.state(step.frame.num_tokens))
        view, walk, select = None, self._walk, step.select
        # Parts may read all states, or know tokens by their places; so do stages; a captured step serves many plans.
        others = step is not self._eager or self._at_work or step.listeners or self._inputs or self._link is not None
        if select is not None and len(select) and not others:
            state["wanted"] = select
        if step.listeners:
            staged = self._link is not None
            view = View(self._platform, self._attention, step.frame, step.streams, step.plan, staged)
            walk = StepWalk(self._first_layer, view, step.listeners)
        narrowed = "wanted" in state
        with self._adapted():
            hidden = self._model.forward(state, walk)
        narrowed = narrowed and "wanted" not in state
        step.hidden = hidden = hidden if view is None or hidden is None else view.spread(hidden)
        if hidden is None:
            assert self._link is not None
            state.update({_stream(layer): stream for layer, stream in step.streams.items()})
            step.left = self._link.left(state)
        elif select is None or len(select):
            if select is not None and not narrowed:
                hidden = self._ops.gather_rows(hidden, select)
            with self._adapted():
                step.logits = self._model.logits(hidden)


def _stream(layer: int) -> str:
    """What the residual stream behind a layer is called where it travels to later stages."""
    return f"stream {layer}"


def _has(part: StepPart, method: str) -> bool:
    return getattr(type(part), method) is not getattr(StepPart, method)
