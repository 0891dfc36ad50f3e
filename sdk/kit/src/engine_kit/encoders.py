"""The encoder's half of an encoder-decoder model, in the worker (entry-point group `engine_parts`): inputs are encoded
when their requests enter a slot, and what the decoder's layers see of them is kept beside the pool.

There is a place for each slot, of as many pages as the longest input needs, so that who has a slot has a place too.
Equal inputs share one, and a place that nobody holds keeps what it has until it is wanted for another: a request that
was preempted, or one that comes after with the same input, finds it encoded. All ranks see requests come and go in one
order, and so choose the same places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch
from engine.interfaces.model import Model
from engine.interfaces.platform import Platform
from engine.interfaces.step import StepPart
from engine.types.kv import KVGroup
from engine.types.model import EncoderForm
from engine.types.plan import LeftSlots, NewSlot, StepPlan
from engine.types.request import EncoderInput
from engine_kit.encoder_places import form_of_place

_PADDING = 1
"""Pages before the first place: where what is no token is written."""
_NOWHERE = -1
"""The place of a slot whose input could not be encoded."""


class Attention(Protocol):
    """What the worker's attention is used for here: `engine.runner.attention.AttentionLayers`."""

    groups: Sequence[KVGroup]
    plans: list[Any]

    def backend(self, group: KVGroup) -> Any:
        """The body that serves a group."""

    def bind(self, pool: torch.Tensor, cross: bool = False) -> None:
        """Give layers their views of a pool."""


class Encoders(StepPart):
    """Encodes, and plans the attention of the decoder's layers over what was encoded.

    Args:
        platform, model, attention: the worker's; the attention's layers of kind "cross" are bound here.
        form: of inputs.
        max_num_seqs: slots.

    Attributes:
        num_encoded: inputs, so far.
    """

    def __init__(
        self, platform: Platform, model: Model, attention: Attention, form: EncoderForm, max_num_seqs: int
    ) -> None:
        self._platform = platform
        self._model = model
        self._attention = attention
        self._encoder = [group for group in attention.groups if group.kind == "encoder"]
        self._cross = [group for group in attention.groups if group.kind == "cross"]
        self._per_block, self._blocks, page_bytes = form_of_place(self._cross, form)
        attention.bind(platform.allocate_pool(_PADDING + max_num_seqs * self._blocks, page_bytes), cross=True)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(max_num_seqs))
        self._held: dict[int, list[int]] = {}
        self._place_of: dict[str, int] = {}
        self._key_of: dict[int, str] = {}
        self._place = np.full(max_num_seqs, _NOWHERE, np.int64)
        self._length = np.zeros(max_num_seqs, np.int32)
        self.num_encoded = 0

    def leave(self, left: LeftSlots) -> None:
        """Give their places back, the content stays."""
        for slot in left.slot.tolist():
            place = int(self._place[slot])
            if place == _NOWHERE:
                continue
            self._place[slot] = _NOWHERE
            self._held[place].remove(slot)
            if not self._held[place]:
                del self._held[place]
                self._free[place] = None

    def enter(self, new: NewSlot) -> None:
        """Find its input, or encode it."""
        given = new.encoder
        assert given is not None, "a request of an encoder-decoder model has nothing to encode"
        place = self._place_of.get(given.key)
        if place is None:
            place = next(iter(self._free))  # free until it has been encoded
            self._place_of.pop(self._key_of.pop(place, ""), None)
            self._encode(given, place)
            self._place_of[given.key] = place
            self._key_of[place] = given.key
        self._free.pop(place, None)
        self._held.setdefault(place, []).append(new.slot)
        self._place[new.slot] = place
        self._length[new.slot] = given.num_tokens

    def _encode(self, given: EncoderInput, place: int) -> None:
        n = given.num_tokens
        starts, lengths, index = np.array([0, n], np.int32), np.array([n], np.int32), np.arange(n, dtype=np.int64)
        blocks = self._pages(np.array([place]), -(-n // self._per_block))
        slots = blocks[0, index // self._per_block].astype(np.int64) * self._per_block + index % self._per_block
        batch = self._batch(starts, lengths, blocks, slots, index)
        for group in (*self._encoder, *self._cross):
            self._attention.plans[group.index] = self._attention.backend(group).plan(batch, group)
        self._model.encode(self._there(given.data))
        self.num_encoded += 1

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> dict[str, torch.Tensor]:
        """Nothing for the state; attention of kind "cross" is planned for the step's rows."""
        rows, counts = plan.slot_of_row, plan.num_tokens
        assert num_tokens == plan.total_tokens, "steps of encoder-decoder models are not captured, and not padded"
        lengths = self._length[rows]
        starts = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        blocks = self._pages(self._place[rows], -(-int(lengths.max()) // self._per_block))
        index = np.repeat(lengths.astype(np.int64) - 1, counts)
        batch = self._batch(starts, lengths, blocks, np.zeros(num_tokens, np.int64), index, plan.num_decodes)
        for group in self._cross:
            self._attention.plans[group.index] = self._attention.backend(group).plan(batch, group)
        return {}

    def _pages(self, places: np.ndarray, count: int) -> np.ndarray:
        """The first pages of these places, int32 [n, count]."""
        first = _PADDING + places[:, None] * self._blocks
        return (first + np.arange(count)).astype(np.int32)

    def _batch(
        self,
        starts: np.ndarray,
        lengths: np.ndarray,
        blocks: np.ndarray,
        slots: np.ndarray,
        index: np.ndarray,
        num_decodes: int = 0,
    ) -> AttentionBatch:
        return AttentionBatch(
            num_rows=len(lengths),
            num_tokens=len(index),
            num_decodes=num_decodes,
            query_start_loc=self._there(starts),
            query_start_loc_host=starts,
            seq_lens=self._there(lengths),
            seq_lens_bound=lengths,
            block_table=self._there(blocks),
            slot_mapping=self._there(slots),
            kv_index=self._there(index),
            bounds_are_exact=True,
        )

    def _there(self, array: np.ndarray) -> torch.Tensor:
        """On the device."""
        host = torch.from_numpy(array if array.flags.writeable else array.copy())  # off the wire it is read-only
        out = torch.empty(host.shape, dtype=host.dtype, device=self._platform.device)
        self._platform.to_device(host, out)
        return out
