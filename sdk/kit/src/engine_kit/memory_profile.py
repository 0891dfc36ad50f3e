"""The largest steps, run once at start on two pages: the platform sees how much memory steps take beside the cache.

The first computes `max_num_batched_tokens` tokens: as many decodes as there are slots but one, the rest as prompts.
Every row draws a token, with filters and log probabilities, or is pooled. The worker runs one layer of each kind, since
a layer's activations are given back before the next: the profile takes a fraction of a step's time, and finds the same
peak. The worker calls this by the entry-point group `engine_parts`.

The second is there for its draw alone: operations may be compiled when they are first called, and rows that ask for
nothing else draw by one (`Ops.draw`) that the first step does not call.

What is not seen: attention over contexts longer than the step's own prompts (drivers compute those in pieces of a
bounded size), the work of logits processors, and that of drafters that look at nothing but tokens. Others observe the
steps, and propose in one more.
"""

from __future__ import annotations

import msgspec
import numpy as np

from engine.types.model import EncoderForm
from engine.types.params import SamplingParams
from engine.types.plan import LeftSlots, NewBlocks, NewSlot, StepPlan
from engine.types.pooling import PoolingParams
from engine.types.request import EncoderInput
from engine.types.start import WorkerStart


def steps_to_profile(start: WorkerStart, num_drafts: int | None = None) -> list[StepPlan]:
    """The steps to run, one after the other; the last leaves nothing behind in a drafter.

    num_drafts: the most of a row, by a drafter that observes steps; None where none does.
    """
    steps = [largest_step(start), *([plain_step(start)] if start.model.generates else [])]
    if num_drafts is not None:
        most = min(num_drafts, start.max_model_len - 2, start.max_num_batched_tokens - 1)
        if most > 0 and start.parallel.pp == 1:  # else the first step's rows are drafted for when they have drawn
            steps.append(drafted_step(start, most))
        steps.append(_left(steps[0]))
    return steps


def largest_step(start: WorkerStart) -> StepPlan:
    """A plan with all tokens and all rows that a step may have."""
    longest = start.max_model_len - 1
    num_decodes = min(start.max_num_seqs, start.max_num_batched_tokens) - 1
    rest = start.max_num_batched_tokens - num_decodes
    prompts = [min(rest, longest)]
    while (rest := rest - prompts[-1]) and num_decodes:
        num_decodes, rest = num_decodes - 1, rest + 1  # a row more that is a prompt, a row less that decodes
        prompts.append(min(rest, longest))
    num_tokens = np.array([1] * num_decodes + sorted(prompts), np.int32)
    slots = np.arange(num_tokens.size, dtype=np.int32)
    pooling = None if start.model.generates else PoolingParams(task=start.model.pooler.tasks[0])
    encoder = None if start.model.encoder is None else _longest_input(start.model.encoder)
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, logprobs=1, repetition_penalty=1.1, seed=0)
    return StepPlan(
        step_id=1,
        slot_of_row=slots,
        num_computed=np.zeros_like(num_tokens),
        num_tokens=num_tokens,
        samples=np.full(num_tokens.size, pooling is None),
        num_decodes=num_decodes if pooling is None else 0,
        new_slots=[
            NewSlot(
                slot=slot,
                request_id=f"profile-{slot}",
                token_ids=np.zeros(n, np.int32),
                num_prompt_tokens=n,
                params=params,
                stop_token_ids=np.empty(0, np.int32),
                pooling=pooling,
                encoder=encoder,
            )
            for slot, n in enumerate(num_tokens.tolist())
        ],
        new_blocks=[_blocks(num_tokens, table.tokens_per_block) for table in start.layout.tables],
    )


def plain_step(start: WorkerStart) -> StepPlan:
    """A request of one token in the first slot, which draws the next and asks for nothing else."""
    first = largest_step(start).new_slots[0]
    token, none = np.ones(1, np.int32), np.zeros(1, np.int32)
    params, tables = SamplingParams(temperature=0.0, seed=0), start.layout.tables
    return StepPlan(
        step_id=2,
        slot_of_row=none,
        num_computed=none,
        num_tokens=token,
        samples=np.ones(1, bool),
        num_decodes=1,
        new_slots=[msgspec.structs.replace(first, token_ids=none, num_prompt_tokens=1, params=params)],
        new_blocks=[_blocks(token, table.tokens_per_block) for table in tables],
        left_slots=LeftSlots(slot=none, num_tokens=np.array([first.num_prompt_tokens], np.int32)),
    )


def _longest_input(form: EncoderForm) -> EncoderInput:
    """One for all rows: inputs are encoded one after the other."""
    steps = form.max_tokens * form.stride
    data = np.zeros((steps, form.features), np.float32) if form.features else np.zeros(steps, np.int32)
    return EncoderInput(key="profile", num_tokens=form.max_tokens, data=data)


def drafted_step(start: WorkerStart, num_drafts: int) -> StepPlan:
    """A plan with all rows that can have so many drafts each, of the slots that `largest_step` has filled."""
    rows = min(start.max_num_seqs, start.max_num_batched_tokens // (1 + num_drafts))
    num_tokens = np.full(rows, 1 + num_drafts, np.int32)
    return StepPlan(
        step_id=3,
        slot_of_row=np.arange(rows, dtype=np.int32),
        num_computed=np.ones(rows, np.int32),
        num_tokens=num_tokens,
        samples=np.ones(rows, bool),
        num_decodes=0,
        new_slots=[],
        new_blocks=[_blocks(num_tokens + 1, table.tokens_per_block) for table in start.layout.tables],
        num_drafts=num_tokens - 1,
    )


def _left(step: StepPlan) -> StepPlan:
    """Its rows leave: the drafter is the one that serves, and is told so."""
    left = LeftSlots(slot=step.slot_of_row, num_tokens=step.num_tokens)
    nothing = step.num_tokens[:0]
    return msgspec.structs.replace(
        step,
        step_id=4,
        left_slots=left,
        slot_of_row=nothing,
        num_computed=nothing,
        num_tokens=nothing,
        samples=step.samples[:0],
        num_decodes=0,
        new_slots=[],
        new_blocks=[],
    )


def _blocks(num_tokens: np.ndarray, tokens_per_block: int) -> NewBlocks:
    """Page 1 for every block of every row."""
    counts = -(-num_tokens // tokens_per_block)
    slot = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    index = np.concatenate([np.arange(n, dtype=np.int32) for n in counts.tolist()])
    return NewBlocks(slot=slot, index=index, page=np.ones(slot.size, np.int32))
