"""The KV manager: finds cached prefixes, gives out pages, commits what was computed, takes back what is not needed.

A step is planned in two passes. In the first the scheduler chooses rows: it asks what is cached (`match`), promises
pages by number (`promise_*`) and holds the pages that hits found. `take_promised` then gets all pages at once, and in
the second pass they are put into the block tables (`place_decodes`, `place_chunk`). So the evictor is called at most
once for each kind of news in a step.

A block counts as cached once its tokens are known and a plan that computes it is made: steps run in order and write a
layer's keys and values before they read any, so whoever finds it in the same plan or a later one reads it whole. A hit
may end within a block (`engine.kv.tails`): then the plan copies pages, whose sources are held until it is done.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.kv.commits import Commits
from engine.kv.cross import CrossGroups
from engine.kv.events import KVEventLog
from engine.kv.hashing import HASH_FUNCTIONS, Hashed, extend_hashes, root_hash
from engine.kv.index import BlockKey, PrefixIndex
from engine.kv.layout import match_unit
from engine.kv.matching import Hit, Tail, match, no_hit
from engine.kv.pool import PagePool
from engine.kv.tables import BlockTable, spans
from engine.kv.tails import NO_TIP, RunningTokens, Sequence, Tails
from engine.types.kv import NULL_PAGE, KVLayout
from engine.types.plan import PageCopies
from engine.types.request import EncoderInput

if TYPE_CHECKING:
    from engine.interfaces.evictor import Evictor

_NO_LIMIT = np.iinfo(np.int32).max


class NewEntries(NamedTuple):
    """Block table entries that one group gained: `block_table[slot[i], block[i]] = page[i]`; int32 [m] each."""

    slot: np.ndarray
    block: np.ndarray
    page: np.ndarray


class KVManager:
    """Pages and block tables of all slots.

    Args:
        layout: the pool's form.
        num_pages: of the workers' pool, the null page included.
        max_num_seqs: slots.
        max_model_len: tokens of the longest request.
        evictor: orders what is given up.
        enable_prefix_caching: False: nothing is hashed, committed or found.
        hash_algo: a name in `engine.kv.hashing.HASH_FUNCTIONS`.
        max_encoder_len: tokens of the longest encoder input.

    Attributes:
        tables: one for each group. The first ones, `growing`, hold the sequences' own tokens; the others, `cross`,
            those of their encoder inputs.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_pages: int,
        max_num_seqs: int,
        max_model_len: int,
        evictor: Evictor,
        enable_prefix_caching: bool = True,
        hash_algo: str = "xxhash",
        max_encoder_len: int = 0,
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.unit = match_unit(layout)
        self.enable_prefix_caching = enable_prefix_caching
        self.index = PrefixIndex(num_pages, len(layout.groups))
        self.pool = PagePool(num_pages, self.index, evictor)
        n = layout.num_growing
        self.growing = tuple(BlockTable(group, max_num_seqs, max_model_len) for group in layout.groups[:n])
        cross = tuple(BlockTable(group, max_num_seqs, max_encoder_len) for group in layout.groups[n:])
        self.tables = self.growing + cross
        self._sliding = tuple(table for table in self.growing if table.window is not None)
        self.num_resets = 0
        self._promised = [0] * len(self.tables)
        self._planned: set[BlockKey] = set()
        self._taken: list[np.ndarray] = []
        self.digest = HASH_FUNCTIONS[hash_algo]
        self.cross = CrossGroups(cross, self.index, self.pool, self.digest, max_encoder_len)
        self._no_entries = [_entries(0, 0, np.empty(0, np.int32)) for _ in cross]
        self.tails = Tails(self.index, self.pool, self.growing, self.block_size, self.unit, self.digest, max_num_seqs)
        self.commits = Commits(
            self.index, self.pool, self.tails, self.growing, self.block_size, self.digest, max_num_seqs
        )
        self._copies: list[tuple[int, np.ndarray, np.ndarray]] = []  # (group, sources, destinations)

    # -- questions ----------------------------------------------------------------------------------------------------
    @property
    def num_available(self) -> int:
        """Pages that can still be promised."""
        return self.pool.num_available - sum(self._promised)

    def fits_at_all(self, num_tokens: int, encoder: EncoderInput | None = None) -> bool:
        """Whether a request of this length could be computed with the whole pool to itself."""
        return self.pages_at_least(num_tokens, encoder) <= self.pool.num_usable

    def pages_at_least(self, num_tokens: int, encoder: EncoderInput | None = None) -> int:
        """Pages that a request of this length needs, computed one token at a time."""
        return sum(table.most_live(num_tokens, 1) for table in self.growing) + self.cross.pages(encoder)

    def check_encoder(self, encoder: EncoderInput | None) -> None:
        """Raise InvalidRequestError where no request of this model can have such an input."""
        self.cross.check(encoder)

    def root_hash(
        self, cache_salt: str | None, lora_id: str | None = None, encoder: EncoderInput | None = None
    ) -> bytes:
        """See `engine.kv.hashing.root_hash`."""
        return root_hash(cache_salt, lora_id, self.digest, encoder)

    def match(self, sequence: Sequence, max_tokens: int, running: RunningTokens | None = None) -> Hit:
        """The longest cached prefix, at most `max_tokens` long: whole blocks (`engine.kv.matching.match`), then a tail
        (`engine.kv.tails`), for which `running` tells the tokens of all slots; without it only cached ones are found.
        The sequence's hashes are extended in place where more are needed. Where blocks of its encoder input are not
        cached, nothing is found.
        """
        if not self.cross.tables:
            return self._match(sequence, max_tokens, running)
        found, groups = self.cross.find(sequence, self._planned, look=self.enable_prefix_caching)
        hit = self._match(sequence, max_tokens if found else 0, running)
        return Hit(hit.num_tokens, hit.groups + groups, hit.tail)

    def _match(self, sequence: Sequence, max_tokens: int, running: RunningTokens | None) -> Hit:
        hit = no_hit(self.growing)
        if not self.enable_prefix_caching:
            return hit
        hashes, root, tokens, media, _, _ = sequence
        extend_hashes(hashes, root, tokens, self.block_size, digest=self.digest, media=media)
        if hashes:
            hit = match(
                self.index,
                self._planned,
                self.growing,
                hashes,
                block_size=self.block_size,
                unit=self.unit,
                max_tokens=max_tokens,
            )
        return self.tails.extend(hit, sequence, max_tokens, running)

    def pages_for_prompt(self, num_tokens: int, chunk: int, hit: Hit) -> int:
        """Pages that admitting a request takes from those available: its new pages until all `num_tokens` tokens are
        computed in chunks of `chunk`, and those pages of the hit that nobody holds."""
        pages = self._candidates_of(hit) + sum(self._missing_cross(hit))
        for group, table in enumerate(self.growing):
            pages += max(0, table.most_live(num_tokens, chunk) - hit.groups[group].pages.size)
        return pages

    def pages_to_finish(self, slot: int, num_tokens: int, chunk: int) -> int:
        """Pages that a slot still needs until all its `num_tokens` tokens are computed in chunks of `chunk`."""
        return sum(
            max(0, table.most_live(num_tokens, chunk) - int(table.num_blocks[slot] - table.first_block[slot]))
            for table in self.growing
        )

    def pages_held_alone(self, slots: np.ndarray) -> np.ndarray:
        """Pages that only this slot holds, of each slot: int [n]."""
        alone = np.zeros(slots.size, np.int64)
        for table in self.tables:
            first = table.first_block[slots]
            place, block = spans(first, table.num_blocks[slots] - first)
            alone += np.bincount(place, self.pool.refs[table.pages[slots[place], block]] == 1, slots.size).astype(int)
        return alone

    # -- first pass ---------------------------------------------------------------------------------------------------
    def leave_window(self, slots: np.ndarray, positions: np.ndarray, last_steps: np.ndarray) -> None:
        """Give back the blocks that left the sliding windows of slots that go on at `positions`.

        last_steps: int [n]; the last step that names each slot.
        """
        for table in self._sliding:
            pages, places = table.leave_window(slots, positions)
            if pages.size:
                self.pool.release(pages, last_steps[places])

    def decode_need(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which slots need a page to compute the one token at their position: bool [growing groups, n]."""
        need = np.empty((len(self.growing), slots.size), bool)
        for of_group, table in zip(need, self.growing, strict=True):
            np.less_equal(table.num_blocks[slots] * table.tokens_per_block, positions, out=of_group)
        return need

    def extend_need(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Pages that each slot needs to have room for `ends` tokens, int [n]: int [growing groups, n]."""
        blocks = [(ends - 1) // table.tokens_per_block + 1 for table in self.growing]
        have = [table.num_blocks[slots] for table in self.growing]
        return np.stack([np.maximum(all_of - n, 0) for all_of, n in zip(blocks, have, strict=True)])

    def promise_decodes(self, need: np.ndarray) -> None:
        """Promise the pages of `decode_need` or `extend_need`; the sum fits `num_available`."""
        for group, of_group in enumerate(need):
            self._promised[group] += int(np.count_nonzero(of_group) if need.dtype == bool else np.add.reduce(of_group))

    def promise_pages(self, counts: Sequences[int]) -> None:
        """Promise pages to each group, to be had by `take_next` in the second pass; below 0: take a promise back."""
        for group, count in enumerate(counts):
            self._promised[group] += count

    def fit_chunk(self, slot: int, start: int, chunk: int, hit: Hit | None = None) -> int:
        """The most tokens from `start`, at most `chunk`, whose pages are available; 0 for none.

        hit: for a request that has no slot yet (`slot` is then ignored).
        """
        have = [self._blocks(table, slot, hit) for table in self.growing]

        def missing(end: int) -> int:
            return sum(max(0, table.blocks(end) - n) for table, n in zip(self.growing, have, strict=True))

        available = self.num_available - self._candidates_of(hit) - sum(self._missing_cross(hit))
        if missing(start + chunk) <= available:
            return chunk
        low, high = 0, chunk  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if missing(start + middle) <= available else (low, middle)
        return low

    def begin_slot(self, slot: int, hit: Hit) -> None:
        """A request enters an empty slot: take the pages of its hit (those of planned blocks follow in `open_slot`)."""
        for group in hit.groups:
            self.pool.hold(group.pages[group.pages != NULL_PAGE])
        if hit.tail is not None:
            for sources in hit.tail.sources:
                (self.pool.hold if hit.tail.cached else self.pool.pin)(sources)
        if self.enable_prefix_caching:
            self.commits.begin(slot, hit.num_whole)

    def promise_chunk(self, slot: int, start: int, chunk: int, hashes: list[bytes], hit: Hit | None = None) -> int:
        """Promise the pages of a chunk that `fit_chunk` allowed, and let later rows of this plan find its blocks.

        Args:
            hashes: of the request's blocks.
            hit: as `begin_slot` got it, in the step in which the slot is begun.

        Returns:
            The number of pages, without those of the encoder's tokens, which are promised with the first chunk.
        """
        end = start + chunk
        commits = self.commits.wants(slot)
        total = 0
        for group, pages in enumerate(self._missing_cross(hit), len(self.growing)):
            self._promised[group] += pages
            if pages and commits and hit is not None:
                self._planned.update(hit.groups[group].keys)
        for group, table in enumerate(self.growing):
            pages = max(0, table.blocks(end) - self._blocks(table, slot, hit))
            self._promised[group] += pages
            total += pages
            if commits and table.group.kind != "state":  # a state is there when its step has ended, not before
                tokens = table.tokens_per_block
                keys = self.index.keys(hashes, group, start // tokens, end // tokens, tokens // self.block_size)
                self._planned.update(keys)
        return total

    # -- second pass --------------------------------------------------------------------------------------------------
    def take_promised(self) -> None:
        """Get all promised pages; from here on no more are promised in this step."""
        self._taken = self.pool.take(self._promised)
        self._promised = [0] * len(self.tables)
        self._planned.clear()

    def take_next(self, group: int, n: int) -> np.ndarray:
        """int32 [n]; of the pages that were promised to a group."""
        return self._next(group, n)

    def place_decodes(self, slots: np.ndarray, need: np.ndarray) -> list[NewEntries]:
        """Put promised pages at the end of the slots that need some (`need`: bool or int [growing groups, n])."""
        entries = []
        for group, table in enumerate(self.growing):
            if need.dtype != bool:
                entries.append(self._place_several(group, slots, need[group]))
                continue
            growing = slots[need[group]]
            if not growing.size:
                entries.append(NewEntries(growing, growing, growing))
                continue
            pages = self._next(group, growing.size)
            index = table.num_blocks[growing]
            table.pages[growing, index] = pages
            table.num_blocks[growing] = index + 1
            entries.append(NewEntries(growing, index, pages))
        return entries + self._no_entries

    def _place_several(self, group: int, slots: np.ndarray, counts: np.ndarray) -> NewEntries:
        table = self.tables[group]
        have = table.num_blocks[slots]
        row, index = spans(have, counts)
        growing, pages = slots[row], self._next(group, row.size)
        table.pages[growing, index] = pages
        table.num_blocks[slots] = have + counts
        return NewEntries(growing, index, pages)

    def open_slot(self, slot: int, hit: Hit, sequence: Sequence) -> list[NewEntries]:
        """Fill an empty slot with what the prefix cache gave it, and with pages for its encoder's tokens.

        Rows are placed in the order in which they were promised, so blocks that an earlier row of this plan computes
        are committed by now.
        """
        self.tails.limits[slot] = 0
        if self.commits.wants(slot) and not sequence.media:
            self.tails.tips[slot] = sequence.before(hit.num_whole // self.block_size)
        entries = []
        for table, group in zip(self.tables, hit.groups, strict=True):
            pages = group.pages
            if group.keys and not pages.size:  # of a "cross" group: this step fills them
                pages = self._next(table.group.index, len(group.keys))
                if self.commits.wants(slot):
                    self.cross.commit(group.keys, pages)
            planned = np.flatnonzero(pages == NULL_PAGE)
            if planned.size:
                pages = pages.copy()
                pages[planned] = [self.index.page_of(group.keys[place]) for place in planned.tolist()]
                self.pool.hold(pages[planned])
            table.num_blocks[slot] = table.first_block[slot] = group.first_block
            table.append(slot, pages)
            entries.append(_entries(slot, group.first_block, pages))
        return entries

    def place_chunk(self, slot: int, end: int, last: bool = True, tail: Tail | None = None) -> list[NewEntries]:
        """Put promised pages into a slot until it has room for `end` tokens.

        Args:
            last: no known token of the slot lies behind.
            tail: of the hit with which the slot was opened just now: copied to the first of these pages.
        """
        entries = []
        for group, table in enumerate(self.growing):
            pages = self._next(group, max(0, table.blocks(end) - int(table.num_blocks[slot])))
            entries.append(_entries(slot, table.append(slot, pages), pages))
            if tail is not None:
                self._copies.append((group, tail.sources[group], pages[: tail.sources[group].size]))
        self.tails.limits[slot] = _NO_LIMIT if last else end
        return entries + self._no_entries

    def take_copies(self, step_id: int) -> PageCopies | None:
        """What the plan of this step has to copy for those placed since the last call. The sources are held until it is
        done."""
        if not self._copies:
            return None
        groups, sources, destinations = zip(*self._copies, strict=True)
        self._copies = []
        group = np.repeat(np.array(groups, np.int32), [pages.size for pages in sources])
        source = np.concatenate(sources)
        self.pool.release(source, step_id)
        return PageCopies(group=group, source=source, destination=np.concatenate(destinations))

    # -- afterwards ---------------------------------------------------------------------------------------------------
    def commit(
        self, slots: np.ndarray, filled: np.ndarray, sequences: Sequences[Hashed | None], tokens: np.ndarray
    ) -> None:
        """Put the full blocks of slots into the prefix cache, see `engine.kv.commits`."""
        self.commits.commit(slots, filled, sequences, tokens)

    def record_events(self) -> None:
        """Write down from now on what happens to the prefix cache; `index.events.take()` gives it."""
        self.index.events = KVEventLog(self.pool.num_pages)

    def trim(self, slots: np.ndarray, num_tokens: np.ndarray, last_step: int) -> None:
        """Give back the pages past `num_tokens` tokens, int [n], of these slots: those of drafts that were rejected.

        last_step: the last step that names the slots.
        """
        released = []
        for table in self.growing:
            blocks = (num_tokens - 1) // table.tokens_per_block + 1
            row, block = spans(blocks, table.num_blocks[slots] - blocks)
            if row.size:
                released.append(table.pages[slots[row], block])
                table.num_blocks[slots] = blocks
        if released:
            self.pool.release(np.concatenate(released), last_step)

    def free_slot(
        self,
        slot: int,
        last_step: int,
        filled: int = 0,
        sequences: Sequences[Hashed | None] = (),
        tokens: np.ndarray | None = None,
    ) -> None:
        """Give back everything that a slot holds.

        Args:
            last_step: the last step that names it.
            filled, sequences, tokens: as for `commit`; the slot's last block is kept for tails where it is filled in
                part. 0 keeps nothing.
        """
        if filled and self.commits.wants(slot):
            assert tokens is not None
            self.commit(np.array([slot]), np.array([filled]), sequences, tokens)
            held = sequences[slot]
            assert held is not None
            self.tails.keep(slot, Sequence(held.hashes, held.root, tokens[slot, :filled], held.media, held.lora_id))
        self.tails.tips[slot] = NO_TIP
        for table in self.tables:
            self.pool.release(table.clear(slot), last_step)
        self.commits.end(slot)

    def distrust(self, slot: int, sequence: Sequence) -> None:
        """Some keys or values of a slot's sequence are not numbers, and nobody knows which: the slot commits nothing
        more, and nobody finds what the prefix cache has of the sequence. Who holds these pages keeps them.

        sequence: all its known tokens.
        """
        self.commits.end(slot)
        self.tails.tips[slot] = NO_TIP
        hashes = self.tails.hashes_of(sequence)
        keys = [self.index.key(hashed, table.group.index) for table in self.growing for hashed in hashes]
        keys += [key for table in self.cross.tables for key in self.cross.keys(sequence, table)]
        pages = {page for key in keys if (page := self.index.page_of(key)) is not None}
        self.pool.discard(np.array(sorted(pages), np.int32))

    def step_done(self, step_id: int) -> None:
        """This step, and all before it, have ended."""
        self.pool.step_done(step_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Requests that are running commit nothing more."""
        self.num_resets += 1
        self.index.clear()
        self.pool.forget_content()
        self.commits.end_all()

    def check_integrity(self) -> None:
        """Raise AssertionError where block tables, counts, index and evictor contradict each other."""
        refs = np.zeros(self.pool.num_pages, np.int32)
        for table in self.tables:
            assert (table.first_block <= table.num_blocks).all()
            for slot in np.flatnonzero(table.num_blocks).tolist():
                np.add.at(refs, table.live(slot), 1)
        assert not any(self._promised) and not self._planned and not self._copies, "pages stay promised between steps"
        self.pool.check_integrity(refs)
        self.index.check_integrity(self.pool.committed)

    def check_slot(self, slot: int, num_tokens: int, encoder: EncoderInput | None) -> None:
        """Raise AssertionError unless the slot has blocks for so many tokens, and for its encoder input."""
        for table in self.tables:
            wanted = num_tokens if table.group.kind != "cross" else 0 if encoder is None else encoder.num_tokens
            assert table.num_blocks[slot] == table.blocks(wanted), f"slot {slot} has not the blocks that it needs"

    # -- helpers ------------------------------------------------------------------------------------------------------
    def _candidates_of(self, hit: Hit | None) -> int:
        if hit is None:
            return 0
        pages = [group.pages for group in hit.groups]
        if hit.tail is not None:
            pages += hit.tail.sources
        return sum(int(np.count_nonzero(self.pool.candidate[of_group])) for of_group in pages)

    def _missing_cross(self, hit: Hit | None) -> list[int]:
        """Pages that a request which enters a slot needs in each "cross" group, beside those of its hit and those that
        are promised for what is loaded."""
        if hit is None or not self.cross.tables:
            return []
        return [max(0, len(group.keys) - group.pages.size) for group in hit.groups[len(self.growing) :]]

    @staticmethod
    def _blocks(table: BlockTable, slot: int, hit: Hit | None) -> int:
        if hit is None:
            return int(table.num_blocks[slot])
        return hit.num_whole // table.tokens_per_block

    def _next(self, group: int, n: int) -> np.ndarray:
        pages = self._taken[group][:n]
        self._taken[group] = self._taken[group][n:]
        assert pages.size == n
        return pages


def _entries(slot: int, first: int, pages: np.ndarray) -> NewEntries:
    return NewEntries(np.full(pages.size, slot, np.int32), np.arange(first, first + pages.size, dtype=np.int32), pages)
