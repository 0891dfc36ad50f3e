"""The walk over a model's layers, and those who look on: listeners of parts.

A stage of a pipeline has its own layers alone, so its walk is cut by the model (`engine.modeling.Stack`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch
from engine.interfaces.model import State
from engine.interfaces.ops import Ops
from engine.interfaces.platform import Platform
from engine.interfaces.step import LayerListener, StepView
from engine.runner.attention import AttentionLayers, LayerAttention
from engine.runner.buffers import StepInputBuffers
from engine.sampling.packed import send
from engine.types.errors import EngineError
from engine.types.kv import NULL_PAGE
from engine.types.plan import StepPlan


class StepWalk:
    """Every layer, in order. Implements `engine.interfaces.model.LayerIterator`.

    Args:
        first: the index of the first layer.
        view: what listeners see; None where there are none.
        listeners: who looks on.
    """

    def __init__(self, first: int = 0, view: View | None = None, listeners: Sequence[LayerListener] = ()) -> None:
        self._first = first
        self._view = view
        self._listeners = listeners

    def __call__(self, layers: Iterable[Any], state: State) -> Iterator[Any]:
        """See there. With nobody looking on, the step stays one captured unit."""
        return iter(layers) if self._view is None else self._heard(layers, state, self._view)

    def _heard(self, layers: Iterable[Any], state: State, view: View) -> Iterator[Any]:
        view.state = state
        for index, layer in enumerate(layers, self._first):
            heard = [listener for listener in self._listeners if listener.layers is None or index in listener.layers]
            for listener in heard:
                view.captured = listener.captured
                listener.before(index, view)
            yield layer
            for listener in heard:
                view.captured = listener.captured
                listener.after(index, view)


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
        if isinstance(part, LayerAttention):
            yield part.layer.group.index
        elif depth and not isinstance(part, torch.Tensor):
            yield from groups_of(part, depth - 1)


class View:
    """A step between two layers. Implements `engine.interfaces.step.StepView`.

    Args:
        platform, attention: the worker's.
        frame: the step's inputs.
        streams: where listeners record.
        plan: of the step; None where that is captured.
        staged: whether there are several pipeline stages.

    Attributes:
        state: the model's.
        captured: whether the listener's work is part of captured steps: it sees no plan then, in others neither.
    """

    def __init__(
        self,
        platform: Platform,
        attention: AttentionLayers,
        frame: StepInputBuffers,
        streams: dict[int, torch.Tensor],
        plan: StepPlan | None,
        staged: bool,
    ) -> None:
        self.state = State()
        self.captured = False
        self._streams = streams
        self._platform = platform
        self._attention = attention
        self._batches = frame.batches
        self._num_tokens = frame.num_tokens
        self._plan = plan
        self._staged = staged
        self._chosen: torch.Tensor | None = None

    @property
    def plan(self) -> StepPlan:
        if self._plan is None or self.captured:
            raise _refused("look at a step's plan, keys and values, or select its tokens", "the listener is captured")
        return self._plan

    def select(self, tokens: torch.Tensor) -> None:
        asked, groups, there = "compute some of a step's tokens only", self._attention.groups, self.plan is not None
        if self._staged:
            raise _refused(asked, "there are several pipeline stages, of which each computes all tokens")
        if not all(self._attention.need(group).features & {"kv_index"} for group in groups) or not there:
            raise _refused(asked, "attention was not asked for the feature 'kv_index'")
        places = tokens.cpu().numpy()
        size = self._num_tokens if self._chosen is None else len(self._chosen)
        if not len(places) or places[0] < 0 or places[-1] >= size or (np.diff(places) < 1).any():
            raise _refused(asked, f"the places {places!r:.80} are not ascending ones of {size} tokens")
        self._chosen = tokens if self._chosen is None else self._chosen[tokens]
        for name, tensor in self.state.items():
            self.state[name] = tensor.index_select(0, tokens)
        narrowed: dict[int, AttentionBatch] = {}
        for batch in self._batches:
            if id(batch) not in narrowed:
                narrowed[id(batch)] = self._narrowed(batch, tokens, places)
        self._batches = tuple(narrowed[id(batch)] for batch in self._batches)
        plans = zip(groups, self._batches, strict=True)
        self._attention.plans[:] = [self._attention.backend(group).plan(batch, group) for group, batch in plans]

    def _narrowed(self, batch: AttentionBatch, tokens: torch.Tensor, places: np.ndarray) -> AttentionBatch:
        """The batch of these tokens: rows without any are left out."""
        counts = np.bincount(
            np.searchsorted(batch.query_start_loc_host, places, side="right") - 1, minlength=batch.num_rows
        )
        rows = np.flatnonzero(counts)
        starts = np.append(0, np.cumsum(counts[rows])).astype(np.int32)
        starts_there, rows_there = send(self._platform, starts, rows)
        return AttentionBatch(
            num_rows=len(rows),
            num_tokens=len(places),
            num_decodes=int(np.searchsorted(rows, batch.num_decodes)),
            query_start_loc=starts_there,
            query_start_loc_host=starts,
            seq_lens=batch.seq_lens[rows_there],
            seq_lens_bound=batch.seq_lens_bound[rows],
            block_table=batch.block_table[rows_there],
            slot_mapping=batch.slot_mapping[tokens],
            kv_index=batch.kv_index[tokens],
            hidden=None if batch.hidden is None else batch.hidden[tokens],
            bounds_are_exact=batch.bounds_are_exact,
        )

    def record(self, layer: int, stream: torch.Tensor) -> None:
        self._streams[layer] = self.spread(stream)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """What was computed of some tokens as that of all: [n, ...] -> [T, ...], NaN where a token was left out."""
        if self._chosen is None:
            return x
        return x.new_full((self._num_tokens, *x.shape[1:]), torch.nan).index_copy_(0, self._chosen, x)

    def read(self, site: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layer(site).read(slots)

    def write(self, site: int, slots: torch.Tensor, *kept: torch.Tensor) -> None:
        layer, n = self._layer(site), len(slots)
        group = layer.layer.group
        starts, lengths = np.array([0, n], np.int32), np.array([n], np.int32)
        table = np.full((1, -(-n // group.tokens_per_block)), NULL_PAGE, np.int32)
        places = send(self._platform, starts, lengths, table, np.arange(n))
        batch = AttentionBatch(
            num_rows=1,
            num_tokens=n,
            num_decodes=0,
            query_start_loc=places[0],
            query_start_loc_host=starts,
            seq_lens=places[1],
            seq_lens_bound=lengths,
            block_table=places[2],
            slot_mapping=slots,
            kv_index=places[3],
            bounds_are_exact=True,
        )
        layer.write(kept, self._attention.backend(group).plan(batch, group))

    def _layer(self, site: int) -> LayerAttention:
        if self.plan is not None and (found := self._attention.sites.get(site)) is not None:
            return found
        raise _refused(f"look at the keys and values of site {site}", "this worker has no such layer")


class StreamRecorder(LayerListener):
    """Records the residual stream behind some layers: what each has added up to there, [T, H].

    Args:
        ops: the worker's.
        layers: indices in the model.
    """

    captured = True

    def __init__(self, ops: Ops, layers: Iterable[int]) -> None:
        self._ops = ops
        self.layers = frozenset(layers)

    def after(self, layer: int, view: StepView) -> None:
        """A new tensor: later layers compute in place."""
        hidden, residual = view.state["hidden"], view.state.get("residual")
        view.record(layer, self._ops.scale(hidden, 1.0) if residual is None else self._ops.add(hidden, residual))


def _refused(asked: str, found: str) -> EngineError:
    return EngineError(asked, found, "tell the author of the part whose listener asks")
