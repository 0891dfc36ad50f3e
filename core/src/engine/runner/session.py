"""What a drafter sees of the runner: its models, run over rows of their own or over a whole step, and draws.

Passes of one token a row are captured as decode steps are, where the platform captures these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.interfaces.drafter import DraftBatch, DraftRows
from engine.interfaces.model import Model, State
from engine.interfaces.ops import Ops
from engine.interfaces.platform import CaptureKey, Platform
from engine.interfaces.step import TargetStep
from engine.runner.attention import AttentionLayers
from engine.runner.buffers import SlotTables, StepBuffers, StepInputBuffers
from engine.runner.capture import DecodeTrial, decodes
from engine.runner.step import LaunchedStep, Step
from engine.runner.walk import StepWalk
from engine.sampling.packed import send
from engine.sampling.sampler import Sampler
from engine.types.start import WorkerStart


class Session:
    """Implements `engine.interfaces.drafter.DraftSession`.

    Args:
        start: sizes, and what is said of the models.
        models: that the drafter's card names, loaded.
        ops, platform, attention: the worker's.
        slots: tokens and block tables.
        sampler: of drafts: its rows are others than the target's.
        rejects: drafts come with the distribution that they are drawn from.
        max_tokens: that a slot can have in one run.
        branches: they may be rows of their own.
        buckets: rows of the passes that are captured; none where nothing is.
        skips_padding: see `engine.interfaces.platform.PlatformCard`.
        draft_pass: `engine_kit.draft_pass.DraftPass`; None where it would not be recorded.

    Attributes:
        tokens: int32 [max_num_seqs + 1, max_model_len + 1].
        limit: int32 [max_num_seqs + 1]; for each slot that wants drafts, the tokens that it has pages for.
    """

    def __init__(
        self,
        start: WorkerStart,
        models: Sequence[Model],
        ops: Ops,
        platform: Platform,
        attention: AttentionLayers,
        slots: SlotTables,
        sampler: Sampler,
        rejects: bool,
        max_tokens: int,
        branches: bool,
        buckets: tuple[int, ...],
        skips_padding: bool,
        draft_pass: Any,
    ) -> None:
        self.tokens = slots.tables.tokens
        self.limit = np.zeros(slots.scratch_slot + 1, np.int32)
        self._start = start
        self._models = models
        self._ops = ops
        self._platform = platform
        self._attention = attention
        self._slots = slots
        self._sampler = sampler
        self._rejects = rejects
        self._buckets = buckets
        self._skips_padding = skips_padding
        self._groups = [[group for group in attention.groups if group.model == 1 + i] for i in range(len(models))]
        rows = max(start.max_num_seqs, *buckets, 1)
        tokens = rows * max_tokens
        rows = tokens if branches else rows
        share = start.place.cp_rank, start.place.cp_size
        self._buffers = StepBuffers(platform, slots, attention.groups, rows, tokens, share) if models else None
        self._captured: dict[tuple[int, int], Step] = {}
        self._passes: dict[tuple[int, int], Any] = {}
        alone = start.place.cp_size == 1 and attention.states is None  # rows of the trial share a page
        more = self._buffers, sampler, self.limit, start.model.vocab_size, skips_padding
        captures = draft_pass is not None and alone and not rejects
        self._draft_pass = partial(draft_pass, platform, ops, slots.tables, *more) if captures else None
        self._eager: Step | None = None

    def capture(self) -> None:
        """Capture what can be, once, before anything is proposed. The attention is bound to the pool."""
        for index, draft in enumerate(self._start.drafts):
            steps: dict[tuple[int, int], Step] = {}
            for bucket in reversed(self._buckets if self._groups[index] else ()):
                assert self._buffers is not None
                step = Step(self._buffers.frame(bucket, bucket, 1), [None] * len(self._attention.groups))
                if draft.features:
                    dtype, device = getattr(torch, self._start.dtype), self._platform.device
                    step.more = {"features": torch.zeros(bucket, draft.features, dtype=dtype, device=device)}
                trial = DecodeTrial(
                    self._platform,
                    self._buffers,
                    self._attention,
                    step,
                    self._start.model.vocab_size,
                    self._start.max_model_len,
                    partial(self._plan, index, step, keep=True),
                    tuple(step.more.values()),
                )
                forward = partial(self._compute, index, step)
                key = CaptureKey(bucket, of=f"draft{index}")
                step.run = self._platform.capture(forward, key, trial.trial)
                if step.run is forward:
                    break
                steps[index, bucket] = step
                if self._draft_pass is not None and not draft.features:
                    own, drawn = Step(step.frame, step.plans), self._draft_pass(step.frame, trial.plan)
                    forward, of = partial(self._compute, index, own), self._models[index]
                    if drawn.capture(forward, own, of, key, trial.trial, self._attention.pool):
                        self._passes[index, bucket] = drawn
            else:
                self._captured |= steps

    def model(self, index: int = 0) -> Model:
        return self._models[index]

    def run(self, index: int, batch: DraftBatch) -> torch.Tensor:
        m, each, slot, start = len(batch.slot), batch.num_tokens, batch.slot, batch.start
        fits = start + each <= self.limit[slot]
        if not fits.all():  # what would lie behind goes to the padding rows' slot
            slot = np.where(fits, slot, self._slots.scratch_slot).astype(np.int32)
            start = np.where(fits, start, 0)
        step = self._captured_step(index, batch)
        captured = step is not None
        if step is None:
            step = self._eager_step(m, m * each, each if batch.hidden is None else 0)
            step.more = {} if batch.features is None else {"features": batch.features}
        elif batch.features is not None:
            step.more["features"][:m] = batch.features
        assert self._buffers is not None
        plan = decodes(start, each, slot)
        if batch.hidden is not None:
            plan.num_decodes = 0
        self._buffers.fill(step.frame, plan)
        inputs = step.frame.inputs
        self._ops.prepare_inputs(self._slots.tables, inputs)
        self._buffers.place_keys(step.frame)
        inputs.token_ids[: m * each] = batch.token_ids
        if batch.hidden is not None:
            bits = np.where(fits, batch.hidden, 0)
            beyond = np.unpackbits(bits.view(np.uint8)).reshape(m, 64).sum(axis=1, dtype=np.int64)
            kv_index, hidden, positions = send(self._platform, start.astype(np.int64), bits, start - beyond)
            inputs.positions.copy_(positions)
            for of_group in step.frame.batches:
                of_group.kv_index = kv_index
                of_group.hidden = hidden
        plans, of_target = self._attention.plans, list(self._attention.plans)
        self._plan(index, step, keep=captured)
        if not captured:
            self._compute(index, step)
        else:
            assert step.run is not None
            step.run(*([m] if self._skips_padding else []))
        plans[:] = of_target
        assert step.hidden is not None
        return step.hidden[: m * each]

    def run_step(self, index: int, step: TargetStep, features: torch.Tensor | None = None) -> torch.Tensor:
        """Attention was planned for all groups, the draft models' too, when the step began."""
        assert isinstance(step, LaunchedStep)
        if features is None:
            return self._forward(index, step.frame, step.frame.inputs.token_ids, {})
        return self._forward(index, step.frame, step.next_tokens, {"features": features})

    def draw(self, logits: torch.Tensor, rows: DraftRows, ahead: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of logits that are no numbers any token is drawn: it is a draft."""
        logits, broken = self._ops.check_logits(logits)
        if self._rejects:  # a draw takes what is no number, its distribution does not
            logits.masked_fill_(broken.unsqueeze(1), 0.0)
        return self._sampler.draft(logits, rows.slot, rows.num_tokens + ahead, self._rejects)

    def draft(self, index: int, rows: DraftRows) -> torch.Tensor | None:
        drawn = self._passes.get((index, self._bucket(len(rows.slot))))
        return None if drawn is None else drawn(rows)

    def _captured_step(self, index: int, batch: DraftBatch) -> Step | None:
        """That computes a batch; None where it has to run as it is."""
        width = 0 if batch.features is None else batch.features.shape[1]
        if batch.num_tokens > 1 or batch.hidden is not None or width != self._start.drafts[index].features:
            return None
        return self._captured.get((index, self._bucket(len(batch.slot))))

    def _bucket(self, rows: int) -> int:
        """The least that has room for so many; 0 for none."""
        return next((bucket for bucket in self._buckets if bucket >= rows), 0)

    def _eager_step(self, *shape: int) -> Step:
        """Its views are made anew only when the shape is another than the last one's: see `StepBuffers.frame`."""
        assert self._buffers is not None, "the card names no models"
        step = self._eager
        if step is None or (step.frame.num_rows, step.frame.num_tokens, step.frame.tokens_per_row) != shape:
            self._eager = step = Step(self._buffers.frame(*shape), [None] * len(self._attention.groups))
        return step

    def _plan(self, index: int, step: Step, keep: bool) -> None:
        """One plan for each of the model's groups; `keep` refills those of the pass before."""
        for group in self._groups[index]:
            batch, earlier = step.frame.batches[group.index], step.plans[group.index] if keep else None
            step.plans[group.index] = self._attention.backend(group).plan(batch, group, earlier)
            self._attention.plans[group.index] = step.plans[group.index]

    def _compute(self, index: int, step: Step) -> None:
        step.hidden = self._forward(index, step.frame, step.frame.inputs.token_ids, step.more)

    def _forward(
        self, index: int, frame: StepInputBuffers, token_ids: torch.Tensor, more: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        state = State(token_ids=token_ids, positions=frame.inputs.positions, **more)
        hidden = self._models[index].forward(state, StepWalk())
        assert hidden is not None
        return hidden
