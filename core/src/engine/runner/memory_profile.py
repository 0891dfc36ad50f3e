"""A largest step, run once at start on two pages: the platform sees how much memory steps take beside the cache.

It computes `max_num_batched_tokens` tokens: as many decodes as there are slots but one, the rest as prompts. Every row
draws a token, with filters and log probabilities, or is pooled. One layer of each kind runs, since a layer's
activations are given back before the next: the profile takes a fraction of a step's time, and finds the same peak.

What it does not see: attention over contexts longer than the step's own prompts (drivers compute those in pieces of a
bounded size), and the work of drafters and of logits processors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from engine.interfaces.model import State
from engine.runner.assemble import Assembly
from engine.runner.attention import LatentLayerAttention, LayerAttention
from engine.runner.model_runner import ModelRunner
from engine.types.params import SamplingParams
from engine.types.plan import NewBlocks, NewSlot, StepPlan
from engine.types.pooling import PoolingParams
from engine.types.start import WorkerStart

PROFILE_PAGES = 2
"""The null page, and one on which all rows write."""


class OneOfEachKind:
    """A walk over the first layer of each class and KV group, of each stack that the model walks."""

    def __call__(self, layers: Iterable[Any], state: State) -> Iterator[Any]:
        """See `engine.interfaces.model.LayerIterator`."""
        seen = set()
        for layer in layers:
            kind = (type(layer), frozenset(groups_of(layer)))
            if kind not in seen:
                seen.add(kind)
                yield layer


def groups_of(layer: Any, depth: int = 4) -> Iterator[int]:
    """The KV groups of the attention that a layer holds, by itself or in its parts: by these layers are told apart,
    for an index says nothing of a model that walks twice or begins at a later layer."""
    for part in vars(layer).values() if hasattr(layer, "__dict__") else ():
        if isinstance(part, LayerAttention | LatentLayerAttention):
            yield part.layer.group.index
        elif depth and not isinstance(part, torch.Tensor):
            yield from groups_of(part, depth - 1)


def profile_step(start: WorkerStart, parts: Assembly) -> None:
    """Run a largest step, from building its buffers to its result. The attention stays bound to a pool of two pages."""
    pool = parts.platform.allocate_pool(PROFILE_PAGES, start.layout.page_bytes)
    parts.attention.bind(pool)
    runner = ModelRunner(
        start,
        parts.platform,
        parts.ops,
        parts.attention,
        parts.model,
        walk=OneOfEachKind(),
        stages=parts.groups.get("pp"),
    )
    runner.execute(largest_step(start)).result()
    runner.flush()


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
            )
            for slot, n in enumerate(num_tokens.tolist())
        ],
        new_blocks=[_blocks(num_tokens, table.tokens_per_block) for table in start.layout.tables],
    )


def _blocks(num_tokens: np.ndarray, tokens_per_block: int) -> NewBlocks:
    """Page 1 for every block of every row."""
    counts = -(-num_tokens // tokens_per_block)
    slot = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    index = np.concatenate([np.arange(n, dtype=np.int32) for n in counts.tolist()])
    return NewBlocks(slot=slot, index=index, page=np.ones(slot.size, np.int32))
