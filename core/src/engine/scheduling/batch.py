"""What a step will compute, first as chosen, then as the plan that travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from engine.kv.matching import Hit
from engine.kv.reservation import Reservation
from engine.kv.swap import SwapIn
from engine.scheduling.loading import Connector, Connectors
from engine.scheduling.preemption import Swapping
from engine.scheduling.slots import Request, SlotTable
from engine.types.plan import GivenDrafts, KnownTokens, NewSlot, StepPlan

_NO_SLOTS = np.empty(0, np.int32)


@dataclass(slots=True)
class Chunk:
    """Known tokens of one request that a step computes.

    Args:
        start, size: positions `start .. start + size - 1`.
        samples: the last of them is the last token known, so the step draws the next, where the request generates.
        hit: what the request has cached, where it enters a slot in this step; None where it has one.
        swap_in: where it enters a slot with pages that this step fills; `hit` is that of this.
        source: the connector that fills them; None: it was swapped, and comes back.
    """

    request: Request
    slot: int
    start: int
    size: int
    samples: bool
    hit: Hit | None
    swap_in: SwapIn | None = None
    source: Connector | None = None


@dataclass(slots=True)
class Batch:
    """The rows chosen for one step.

    Args:
        budget: tokens that may still be added.
        pages: reserved for the rows.
        decodes: int32 [d]; slots that compute one token each, at `positions`, int32 [d].
        drafts: int32 [d]; tokens that are proposed and computed after it. None: nowhere any.
        given: of these, by the decode's place: tokens that are not asked of the drafter.
        chunks: in the order in which they were chosen.
        left_out: a running request found no page, or less than it wanted: nobody new is admitted.
        reserved: pages that the chunks' requests will want in later steps.
    """

    budget: int
    pages: Reservation
    decodes: np.ndarray = field(default_factory=_NO_SLOTS.copy)
    positions: np.ndarray = field(default_factory=_NO_SLOTS.copy)
    drafts: np.ndarray | None = None
    given: Mapping[int, list[int]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    left_out: bool = False
    reserved: int = 0

    @property
    def empty(self) -> bool:
        """No row was chosen."""
        return not self.decodes.size and not self.chunks


def build_plan(
    step_id: int, batch: Batch, slots: SlotTable, connectors: Connectors, swapping: Swapping | None = None
) -> StepPlan:
    """Give the batch its pages, cache the blocks that it fills with known tokens, and write it down."""
    pages = batch.pages.allocate(step_id, slots.requests, slots.tokens)
    new_slots = []
    for chunk in batch.chunks:
        if chunk.swap_in is not None:
            if chunk.source is None and swapping is not None:
                swapping.swapped_in(chunk.request, chunk.swap_in)
            connectors.fill(step_id, chunk.request, chunk.swap_in, chunk.source)
        connectors.computes(chunk.request, chunk.start, chunk.start + chunk.size)
        if chunk.hit is not None:
            connectors.watch(chunk.request, chunk.hit, chunk.swap_in, chunk.source)
            new_slots.append(_new_slot(chunk.request))

    connectors.planned(pages)
    d = batch.decodes.size
    slot_of_row, num_computed = batch.decodes, batch.positions
    num_tokens, samples = _all(1, d, np.int32), _all(True, d, bool)
    if batch.drafts is not None:
        num_tokens += batch.drafts
    if batch.chunks:
        rows = sorted(batch.chunks, key=lambda chunk: chunk.size)  # short extends before prefills
        slot_of_row = np.append(slot_of_row, np.array([chunk.slot for chunk in rows], np.int32))
        num_computed = np.append(num_computed, np.array([chunk.start for chunk in rows], np.int32))
        num_tokens = np.append(num_tokens, np.array([chunk.size for chunk in rows], np.int32))
        samples = np.append(samples, [chunk.samples for chunk in rows])
    num_drafts = given_drafts = None
    if batch.drafts is not None:
        num_drafts = np.zeros(slot_of_row.size, np.int32)
        num_drafts[:d] = batch.drafts
        d -= int(np.count_nonzero(batch.drafts))
        # Decodes, then extends: rows with drafts among chunks of their size. A chunk of one token is no decode.
        size = np.where(num_drafts > 0, num_tokens, 0)
        size[batch.decodes.size :] = num_tokens[batch.decodes.size :]
        given = batch.given
        if np.count_nonzero(size[1:] < size[:-1]):
            place = np.argsort(size, kind="stable")
            if given:
                given = {row: given[old] for row, old in enumerate(place.tolist()) if old in given}
            slot_of_row, num_computed, num_tokens = slot_of_row[place], num_computed[place], num_tokens[place]
            samples, num_drafts = samples[place], num_drafts[place]
        given_drafts = _given(given, slots.proposed[slot_of_row]) if given else None
    slots.last_step[slot_of_row] = step_id
    masks_follow = slots.num_matched > 0 and bool((slots.matched[slot_of_row] & samples).any())
    return StepPlan(
        step_id=step_id,
        slot_of_row=slot_of_row,
        num_computed=num_computed,
        num_tokens=num_tokens,
        samples=samples,
        num_decodes=d,
        new_slots=new_slots,
        new_blocks=pages.new_blocks,
        num_drafts=num_drafts,
        given_drafts=given_drafts,
        left_slots=slots.take_left(),
        known=_known(batch.decodes, slots),
        copies=pages.copies,
        reuse=batch.pages.reuse(step_id, slot_of_row, num_computed, num_tokens),
        sections=None if batch.empty else connectors.sections(),
        masks_follow=masks_follow,
    )


def _all(value: int, n: int, dtype: type) -> np.ndarray:
    """n times this value. `np.full` takes four times as long, in every step."""
    array: np.ndarray = np.empty(n, dtype)
    array.fill(value)
    return array


def _given(tokens: Mapping[int, list[int]], proposed: np.ndarray) -> GivenDrafts:
    """By row of the plan."""
    rows = sorted(tokens)
    width = max(map(len, tokens.values()))
    padded = [[*tokens[row], *[-1] * (width - len(tokens[row]))] for row in rows]
    return GivenDrafts(row=np.array(rows, np.int32), tokens=np.array(padded, np.int32), proposed=proposed[rows])


def _known(decodes: np.ndarray, slots: SlotTable) -> KnownTokens | None:
    """The token that each waiting slot has got back since its last step; a prompt's came with its slot."""
    if not slots.num_waits or not (waiting := decodes[slots.waits[decodes]]).size:
        return None
    position = slots.known[waiting] - 1
    return KnownTokens(slot=waiting, position=position, token=slots.tokens[waiting, position])


def _new_slot(request: Request) -> NewSlot:
    return NewSlot(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        stop_token_ids=request.stop_token_ids,
        pooling=request.pooling,
        cache_salt=request.cache_salt,
        encoder=request.encoder,
        adapter=request.place,
        embeds=request.embeds,
    )
