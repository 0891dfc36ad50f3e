"""What requests reuse of cached sequences that are no prefix of theirs (`engine.interfaces.evictor.Reuse`): found when
they are admitted, and kept until the last step that reads it is done."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.kv.index import PrefixIndex
from engine.kv.matching import Sequence
from engine.kv.pool import PagePool
from engine.kv.tables import BlockTable
from engine.types.errors import ContractError
from engine.types.kv import NULL_PAGE
from engine.types.plan import ReusedTokens

if TYPE_CHECKING:
    from engine.interfaces.evictor import Reuse, ReusingEvictor

_NOWHERE = -1


@dataclass(frozen=True)
class Reused:
    """What one request reuses.

    Args:
        source: int64 [n]; of each of its first tokens, where the KV table has the one that it reuses; or _NOWHERE.
        position: int32 [n]; of each in the sequence that was computed.
        pages: int32; where these lie, none twice.
        blocks: by hash, the page that is to hold it; NULL_PAGE for what is not cached any more, or not read.
    """

    source: np.ndarray
    position: np.ndarray
    pages: np.ndarray
    blocks: dict[bytes, int]


class Reuses:
    """The spans of all slots.

    Args:
        evictor: finds them.
        index, pool, table: the manager's; the table is the only one.

    Attributes:
        num_tokens: reused since start.
    """

    def __init__(self, evictor: ReusingEvictor, index: PrefixIndex, pool: PagePool, table: BlockTable) -> None:
        self._evictor = evictor
        self._index = index
        self._pool = pool
        self._table = table
        self._size = table.tokens_per_block
        self._of_slot: dict[int, Reused] = {}
        self._entered: dict[int, Reused] = {}
        """Of what each slot's request may have reused, as long as it has the slot."""
        self.num_tokens = 0

    def remember(self, sequence: Sequence) -> None:
        """What has been computed of a sequence is cached, its whole blocks."""
        blocks = min(len(sequence.hashes), sequence.tokens.size // self._size)
        if blocks:
            tokens = sequence.tokens[: blocks * self._size].copy()
            self._evictor.remember(sequence.root, tokens, sequence.hashes[:blocks])

    def find(self, sequence: Sequence, start: int, end: int, spare: int) -> Reused | None:
        """What a request may reuse of its tokens start .. end - 1; `spare`: pages that nobody holds may be kept for it.

        Raises ContractError where the evictor's spans are none.
        """
        source = np.full(end, _NOWHERE, np.int64)
        position = np.zeros(end, np.int32)
        kept, known = np.empty(0, np.int32), start
        blocks: dict[bytes, int] = {}
        for span in self._evictor.reuse(sequence.root, sequence.tokens, start):
            pages = self._pages_of(span, known, sequence.tokens.size)
            known = span.end
            more = np.union1d(kept, pages[pages != NULL_PAGE])
            if np.count_nonzero(self._pool.evictable[more]) > spare:
                break
            there = np.arange(span.position, span.position + span.end - span.start)[: max(0, end - span.start)]
            page = pages[there // self._size - span.position // self._size].astype(np.int64)
            stop, slot = span.start + there.size, page * self._size + there % self._size
            source[span.start : stop] = np.where(page == NULL_PAGE, _NOWHERE, slot)
            position[span.start : stop] = there
            kept = more
            blocks.update(zip(span.hashes, pages.tolist(), strict=True))
        found = np.flatnonzero(source != _NOWHERE)
        if not found.size:
            return None
        last = int(found[-1]) + 1
        pages = np.unique(source[found] // self._size).astype(np.int32)
        read = {hashed: page if page in pages else NULL_PAGE for hashed, page in blocks.items()}
        return Reused(source[:last], position[:last], pages, read)

    def _pages_of(self, span: Reuse, known: int, num_tokens: int) -> np.ndarray:
        """The pages of its blocks, int32 [m]; NULL_PAGE for one that is not cached any more."""
        last = span.position + span.end - span.start - 1
        blocks = last // self._size - span.position // self._size + 1
        if not (known <= span.start < span.end <= num_tokens and span.position >= 0 and len(span.hashes) == blocks):
            raise ContractError(
                f"find what {num_tokens} tokens may reuse behind the first {known}",
                f"the evictor {type(self._evictor).__name__} answered {span!r:.200}",
                "choose another evictor driver and tell its author",
                point="evictor",
            )
        keys = self._index.keys(list(span.hashes), 0)
        return np.array([self._index.page_of(key) or NULL_PAGE for key in keys], np.int32)

    def enter(self, slot: int, reused: Reused) -> None:
        """A request enters a slot with this."""
        self._pool.hold(reused.pages)
        self._of_slot[slot] = reused
        self._entered[slot] = reused

    def tokens_of(self, slot: int) -> int:
        """That the request which entered it reuses."""
        return int(np.count_nonzero(self._of_slot[slot].source != _NOWHERE)) if slot in self._of_slot else 0

    def of_step(
        self, step_id: int, slots: np.ndarray, num_computed: np.ndarray, num_tokens: np.ndarray
    ) -> ReusedTokens | None:
        """What the rows of a step reuse, which have their pages. Pages that no later step reads are given back."""
        columns, size, pages = [], self._size, self._table.pages
        for slot, reused in list(self._of_slot.items()):
            for of_row in np.flatnonzero(slots == slot).tolist():
                first, end = int(num_computed[of_row]), int(num_computed[of_row] + num_tokens[of_row])
                place = np.flatnonzero(reused.source[first:end] != _NOWHERE)
                here = first + place
                own = pages[slot, here // size].astype(np.int64) * size + here % size
                rows = np.full(place.size, of_row, np.int32)
                columns.append((rows, place.astype(np.int32), reused.position[here], reused.source[here], own))
                if end >= reused.source.size:
                    self.leave(slot, step_id)
        if not any(entry[0].size for entry in columns):
            return None
        row, place, position, source, destination = (np.concatenate(of) for of in zip(*columns, strict=True))
        self.num_tokens += row.size
        return ReusedTokens(row=row, place=place, position=position, source=source, destination=destination)

    def leave(self, slot: int, last_step: int) -> None:
        """The slot reads nothing more; last_step: the last that names it."""
        if (reused := self._of_slot.pop(slot, None)) is not None:
            self._pool.release(reused.pages, last_step)

    def end(self, slot: int, last_step: int) -> None:
        """The request leaves the slot; likewise."""
        self.leave(slot, last_step)
        self._entered.pop(slot, None)

    def readers(self, pages: np.ndarray, hashes: Set[bytes]) -> set[int]:
        """The slots whose requests read these pages, int32 [n], or may have read blocks with these hashes."""
        reading = {slot for slot, reused in self._of_slot.items() if np.isin(reused.pages, pages).any()}
        return reading | {slot for slot, reused in self._entered.items() if not hashes.isdisjoint(reused.blocks)}

    def let_go(self, last_step: int) -> bool:
        """Give back all pages: what they hold is computed. False where none were held."""
        slots = list(self._of_slot)
        for slot in slots:
            self.leave(slot, last_step)
        return bool(slots)

    def count(self, refs: np.ndarray) -> None:
        """Add the holders that pages have here."""
        for reused in self._of_slot.values():
            refs[reused.pages] += 1
