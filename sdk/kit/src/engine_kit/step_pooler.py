"""Pooling: from the hidden states of a step to one vector for each prompt that it completes, or for each token.

Everything is computed in float32 at least. A prompt that is computed in chunks keeps, from one to the next, the sum of
its hidden states ("mean") or that of its first token ("cls"), or its tokens' labels; "last" needs nothing before its
last chunk.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from engine.interfaces.model import Model
from engine.interfaces.platform import Platform
from engine.interfaces.step import StepOutput, StepPart, TargetStep
from engine.types.model import ModelDescription
from engine.types.plan import NewSlot, PooledRows, StepPlan, StepResult
from engine.types.pooling import PoolingParams


class _Part(NamedTuple):
    """Results of some rows, on their way to the host.

    Args:
        rows: of the plan.
        start: position of the first token, where `data` is [tokens, size] of the one row; -1 where it is [rows, size],
            or [1, tokens, labels] of one.
    """

    rows: list[int]
    start: int
    data: torch.Tensor


class StepPooler(StepPart):
    """Pools the prompts of the slots.

    Args:
        platform, model: the worker's.
        description: of the model.
    """

    def __init__(self, platform: Platform, model: Model, description: ModelDescription) -> None:
        self._platform = platform
        self._model = model
        self._pooler = description.pooler
        self._params: dict[int, PoolingParams] = {}
        self._prompts: dict[int, np.ndarray] = {}
        self._kept: dict[int, torch.Tensor] = {}

    def enter(self, new: NewSlot) -> None:
        """A request enters a slot; it may have been in one before, and is computed again."""
        assert new.pooling is not None, "this engine pools: every request says how"
        self._params[new.slot] = new.pooling
        self._prompts[new.slot] = new.token_ids[: new.num_prompt_tokens]
        self._kept.pop(new.slot, None)

    def launched(self, step: TargetStep) -> StepOutput | None:
        """What the step's rows are pooled to, as far as they are complete."""
        if step.hidden is None:
            return None
        plan = step.plan
        hidden = step.hidden[: plan.total_tokens]
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        ends = np.cumsum(plan.num_tokens).tolist()
        parts: list[_Part] = []
        complete: list[int] = []
        vectors: list[torch.Tensor] = []
        for row, (slot, start, size, end) in enumerate(
            zip(plan.slot_of_row.tolist(), plan.num_computed.tolist(), plan.num_tokens.tolist(), ends, strict=True)
        ):
            params, states = self._params[slot], wide[end - size : end]
            if params.task == "token_embed":
                parts.append(_Part([row], start, self._finished(states, params)))
                continue
            ends_prompt = start + size == len(self._prompts[slot])
            if params.task == "token_classify":
                labels = self._labels_of(slot, params, states.to(hidden.dtype), start, ends_prompt)
                if ends_prompt:
                    parts.append(_Part([row], -1, labels.unsqueeze(0)))
                continue
            vector = self._vector(slot, params, states, start, ends_prompt)
            if vector is not None:
                complete.append(row)
                vectors.append(vector)
        if complete:
            parts += self._results(complete, torch.stack(vectors), hidden.dtype, plan)
        return StepOutput(tuple(part.data for part in parts), partial(_put, parts)) if parts else None

    def _vector(
        self, slot: int, params: PoolingParams, states: torch.Tensor, start: int, complete: bool
    ) -> torch.Tensor | None:
        """A row's vector [H] where its prompt is complete; otherwise what is needed later is kept."""
        kind = params.pooling_type or self._pooler.pooling_type
        if kind == "last":
            return states[-1] if complete else None
        if kind == "cls":
            kept = states[0] if start == 0 else self._kept[slot]
        else:
            kept = states.sum(dim=0)
            if start:
                kept = kept + self._kept[slot]
        if complete:
            self._kept.pop(slot, None)
            return kept if kind == "cls" else kept / len(self._prompts[slot])
        self._kept[slot] = kept.clone()  # no view, which would keep the whole step's states
        return None

    def _labels_of(
        self, slot: int, params: PoolingParams, states: torch.Tensor, start: int, complete: bool
    ) -> torch.Tensor:
        """What the head says of the tokens so far, float32 at least [tokens, labels]; kept for the next chunk."""
        if params.step_tag_id is not None:
            ids = self._prompts[slot][start : start + len(states)]
            states = self._at(states, np.flatnonzero(ids == params.step_tag_id).tolist())
        if len(states):
            logits = self._model.classify(states)
        else:
            logits = states.new_empty(0, self._pooler.num_labels)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if params.returned_token_ids is not None:
            logits = self._at(logits.T, params.returned_token_ids).T
        found = self._activated(logits, params)
        if start:
            found = torch.cat((self._kept[slot], found))
        if complete:
            self._kept.pop(slot, None)
        else:
            self._kept[slot] = found
        return found

    def _results(self, rows: list[int], vectors: torch.Tensor, dtype: torch.dtype, plan: StepPlan) -> list[_Part]:
        """What the requests of these rows asked for, made of their vectors [rows, H]; equal wishes together."""
        together: dict[tuple[object, ...], list[int]] = {}
        for place, row in enumerate(rows):
            p = self._params[int(plan.slot_of_row[row])]
            together.setdefault((p.task, p.dimensions, p.normalize, p.use_activation), []).append(place)
        logits: torch.Tensor | None = None
        parts = []
        for places in together.values():
            params = self._params[int(plan.slot_of_row[rows[places[0]]])]
            if params.task == "classify":
                if logits is None:
                    logits = self._model.classify(vectors.to(dtype)).to(vectors.dtype)
                data = self._activated(self._at(logits, places), params)
            else:
                data = self._finished(self._at(vectors, places), params)
            parts.append(_Part([rows[place] for place in places], -1, data))
        return parts

    def _finished(self, vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Cut and scaled: [n, H] -> [n, size]."""
        if params.dimensions is not None:
            vectors = vectors[:, : params.dimensions]
        normalize = self._pooler.normalize if params.normalize is None else params.normalize
        return F.normalize(vectors, dim=-1) if normalize else vectors

    def _activated(self, logits: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        if params.use_activation is False or self._pooler.activation == "identity":
            return logits
        return logits.sigmoid() if self._pooler.activation == "sigmoid" else logits.softmax(dim=-1)

    def _at(self, x: torch.Tensor, places: list[int]) -> torch.Tensor:
        if places == list(range(len(x))):
            return x
        index = torch.empty(len(places), dtype=torch.int64, device=x.device)
        self._platform.to_device(torch.from_numpy(np.array(places, np.int64)), index)
        return x.index_select(0, index)


def _put(parts: list[_Part], result: StepResult, arrays: list[np.ndarray]) -> None:
    rows: list[int] = []
    start: list[int] = []
    data: list[np.ndarray] = []
    for part, array in zip(parts, arrays, strict=True):
        rows += part.rows
        start += [part.start] * len(part.rows)
        data += [array] if part.start >= 0 else list(array)
    result.pooled = PooledRows(row=np.array(rows, np.int32), start=np.array(start, np.int32), data=data)
