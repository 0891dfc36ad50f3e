"""Ragged batches over a paged pool in which everything that must not be read is NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from engine.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionNeed,
    LayerCache,
    Rotation,
)
from engine.types.kv import KVGroup
from engine_sdk.conformance.attention.dense import DenseResult, Extras, Tree, combined, dense, visible
from engine_sdk.conformance.base import not_served

Rows = Sequence[Sequence[int]]
"""For each row the `kv_index` of its queries, ascending; the last one is the row's last key. -1 is a query that sees
nothing, and whose key goes to the null page. Of kind "cross" all of a row's are that of its last key, and no key is a
query's own."""
Keys = Sequence[tuple[int, int]]
"""(row, place) of some of the rows' keys."""
TOLERANCE = {"float64": 1e-9, "float32": 3e-5, "float16": 5e-3, "bfloat16": 3e-2}
"""Of the output, by the dtype of queries: relative, and absolute for values about 1."""
LSE_TOLERANCE = {"float64": 1e-9, "float32": 3e-5, "float16": 5e-3, "bfloat16": 3e-2}


@dataclass(frozen=True, kw_only=True)
class Form:
    """What one kind of layer looks like.

    Args:
        group_size: query heads for each KV head.
        blocks: the group's tokens per block, as a multiple of what the card's `tokens_per_page` answers.
        spare_bytes: of a page, after its layers.
        rope_size: of kind "mla", whose `head_size` is the cached vector's and whose one KV head all queries share.
    """

    kind: str = "full"
    num_kv_heads: int = 2
    group_size: int = 2
    head_size: int = 16
    block_size: int = 16
    blocks: int = 1
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "float32"
    kv_dtype: str | None = None
    spare_bytes: int = 64
    sinks: bool = False
    alibi: bool = False
    relative_bias: bool = False
    rope_size: int = 0

    def need(self, device: str, rows: Rows = ()) -> AttentionNeed:
        """What a driver is asked for; with "kv_index" where a row's queries are not contiguous."""
        features = {name for name in ("sinks", "alibi", "relative_bias") if getattr(self, name)}
        features |= {"two_sided"} if self.kind == "encoder" and self.window is not None else set()
        gaps = self.kind == "cross" or any(
            row[0] < 0 or list(row) != list(range(row[0], row[-1] + 1)) for row in rows if len(row)
        )
        return AttentionNeed(
            kind=self.kind,
            head_size=self.head_size,
            num_q_heads=self.num_kv_heads * self.group_size,
            num_kv_heads=self.num_kv_heads,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            device=device,
            block_size=self.block_size,
            sliding_window=self.window,
            soft_cap=self.soft_cap,
            features=frozenset(features | ({"kv_index"} if gaps else set())),
            rope_size=self.rope_size,
        )


SPAN = 11
"""Of relative biases: farther keys have the last one."""
NUM_LAYERS = 3
LAYER = 1
"""The layer that is tested; those beside it must stay as they are."""


class Case:
    """One step of some rows, each with its keys in a paged pool.

    Args:
        form: the layer's.
        rows: see `Rows`.
        num_decodes: the first rows, of one query each.
        tokens_per_block: of the group.
        padding_rows: rows of one token after the others, as a captured step has them; only where all rows decode.
        padding_tokens: after the last row.
        empty_rows: rows without tokens after the others, of a step that is captured with any rows; None: of another.
        bound: how much `seq_lens_bound` says too much.
        width: columns of the block table; None: two more than are needed.
        strided: queries, keys and values are views of one projection, as models have them.
        lse: the need has this feature, and `forward` is asked for it.
        share: (rank, ranks): of each row's keys, those whose place is rank modulo ranks are here, in their order, and
            the form's window counts these.
        trees: of some rows, whose last tokens they are; the nodes before the row's tokens were computed before.
        scale_bytes: what the card answered. With scales, vectors of very different sizes are drawn, and what the oracle
            computes with is what the driver reads back, once that was found to be near to what was written.
    """

    def __init__(
        self,
        form: Form,
        rows: Rows,
        num_decodes: int,
        tokens_per_block: int,
        *,
        device: str = "cpu",
        seed: int = 0,
        padding_rows: int = 0,
        padding_tokens: int = 0,
        empty_rows: int | None = None,
        bound: int = 0,
        width: int | None = None,
        strided: bool = False,
        lse: bool = True,
        share: tuple[int, int] = (0, 1),
        trees: Mapping[int, Tree] | None = None,
        scale_bytes: int = 0,
    ) -> None:
        assert not padding_rows or num_decodes == len(rows)
        self.form = form
        self.scale_bytes = scale_bytes
        self.kept: tuple[list[np.ndarray], list[np.ndarray]] | None = None
        self.rows = rows
        self.trees = trees or {}
        self.device = device
        self.need = form.need(device, rows if share[1] == 1 else [[-1]])
        if trees:
            self.need = replace(self.need, features=self.need.features | {"tree"})
        self.lse = lse
        if lse:
            self.need = replace(self.need, features=self.need.features | {"lse"})
        self.random = np.random.default_rng(seed)
        self.dtype: torch.dtype = getattr(torch, form.dtype)
        self.kv_dtype: torch.dtype = getattr(torch, form.kv_dtype or form.dtype)
        vectors = (1 if form.kind == "mla" else 2) * form.num_kv_heads * tokens_per_block
        self.group = KVGroup(
            index=0,
            kind=form.kind,  # type: ignore[arg-type]
            sites=tuple(range(NUM_LAYERS)),
            num_kv_heads=form.num_kv_heads,
            head_size=form.head_size,
            sliding_window=form.window,
            tokens_per_block=tokens_per_block,
            layer_bytes=vectors * (form.head_size * self.kv_dtype.itemsize + scale_bytes),
            num_q_heads=self.need.num_q_heads,
            rope_size=form.rope_size,
        )
        heads = self.need.num_q_heads
        sinks = torch.from_numpy(self.random.normal(size=heads)).float() if form.sinks else None
        slopes = (2.0 ** -torch.arange(1, heads + 1)).float() if form.alibi else None
        biases = (
            torch.from_numpy(self.random.normal(size=(heads, 2 * SPAN + 1))).float() if form.relative_bias else None
        )
        self.extras = Extras(
            form.soft_cap,
            None if slopes is None else slopes.double().numpy(),
            None if sinks is None else sinks.double().numpy(),
            None if biases is None else biases.double().numpy(),
        )
        self.layer = AttentionLayer(
            index=LAYER,
            group=self.group,
            need=self.need,
            scale=form.head_size**-0.5,
            sinks=None if sinks is None else sinks.to(device),
            alibi_slopes=None if slopes is None else slopes.to(device),
            relative_bias=None if biases is None else biases.to(device),
        )
        self._draw_values(strided, padding_rows + padding_tokens)
        self._take_share(*share)
        self._lay_out_pages(tokens_per_block, width)
        self.batch = self._batch(num_decodes, [1] * padding_rows + [0] * (empty_rows or 0), padding_tokens, bound)
        self.batch.any_rows = empty_rows is not None
        self.history = self._history()

    # -- numbers -----------------------------------------------------------------------------------------------------
    def _draw_values(self, strided: bool, padding: int) -> None:
        """Keys and values of every position; what no query sees is NaN. And this step's queries."""
        form = self.form
        self.k: list[np.ndarray] = []
        self.v: list[np.ndarray] = []
        for row in self.rows:
            for values in (self.k, self.v):
                drawn = self.random.normal(size=(row[-1] + 1, form.num_kv_heads, form.head_size))
                if self.scale_bytes:
                    drawn *= 2 ** self.random.uniform(-4, 1, size=(*drawn.shape[:2], 1))
                values.append(self._round(drawn))
        heads, kv_heads = form.num_kv_heads * form.group_size, form.num_kv_heads
        self.num_real = sum(len(row) for row in self.rows)
        tokens = self.num_real + padding
        fused = self.random.normal(size=(tokens, heads + 2 * kv_heads, form.head_size))
        for part, values in ((slice(heads, heads + kv_heads), self.k), (slice(heads + kv_heads, None), self.v)):
            fused[: self.num_real, part] = self.new_of(values, fused[: self.num_real, part])
        whole = torch.from_numpy(fused).to(self.dtype).to(self.device)
        parts = torch.split(whole, [heads, kv_heads, kv_heads], dim=1)
        self.q, self.new_k, self.new_v = parts if strided else (part.contiguous() for part in parts)

    def new_of(self, values: Sequence[np.ndarray], of_others: np.ndarray) -> np.ndarray:
        """Of each row's keys or values those of this step's tokens.

        of_others: [num_real, ...]; what a token has that has no place in its row.
        """
        places = np.array([place for row in self.rows for place in row])
        taken = [x[[p for p in row if p >= 0]] for x, row in zip(values, self.rows, strict=True)]
        found = of_others.copy()
        found[places >= 0] = np.concatenate(taken)
        return found

    def _take_share(self, rank: int, ranks: int) -> None:
        """Keep this rank's keys alone; what no query sees of them is NaN."""
        self.k, self.v = ([values[rank::ranks].copy() for values in part] for part in (self.k, self.v))
        self.lengths = np.array([len(keys) for keys in self.k], np.int32)
        self.index = [(np.array(row) - rank) // ranks for row in self.rows]
        own = self.form.kind != "cross"
        self.is_here = [[own and place >= 0 and place % ranks == rank for place in row] for row in self.rows]
        places = [zip(row, is_here, strict=True) for row, is_here in zip(self.rows, self.is_here, strict=True)]
        self.own = [[place // ranks for place, is_here in row if is_here] for row in places]
        self.seen = [visible(i, int(n), self.form.window) for i, n in zip(self.index, self.lengths, strict=True)]
        self.ahead = [np.arange(n) - i[:, None] for i, n in zip(self.index, self.lengths.tolist(), strict=True)]
        for row, tree in self.trees.items():
            self._grow(row, tree)
        for part in (self.k, self.v):
            for values, seen in zip(part, self.seen, strict=True):
                values[~seen.any(axis=0)] = np.nan

    def _grow(self, row: int, tree: Tree) -> None:
        """Let a row's last tokens be those of a tree, or the tree's last ones."""
        nodes, length = len(tree.depths), int(self.lengths[row])
        position, root = np.arange(length), length - nodes
        position[root:] = root + tree.depths
        own = position[self.index[row]]
        self.ahead[row] = position - own[:, None]
        queried = min(nodes, len(own))
        self.seen[row][-queried:] = True
        self.seen[row][-queried:, root:] = tree.follows[-queried:]
        if self.form.window is not None:
            self.seen[row] &= np.abs(self.ahead[row]) < self.form.window

    def _round(self, values: np.ndarray) -> np.ndarray:
        """As they are stored; with scales, as they are given."""
        wide = torch.from_numpy(values).to(self.dtype)
        rounded: np.ndarray = (wide if self.scale_bytes else wide.to(self.kv_dtype)).double().numpy()
        return rounded

    def spoil(self, row: int, place: int, value: float, values_alone: bool) -> None:
        """Put `value` into all elements of a row's key and value at this place, and of the query that stands there; or
        into the value alone."""
        for part in [self.v] if values_alone else [self.k, self.v]:
            part[row][place] = value
        if place in self.rows[row]:
            token = sum(map(len, self.rows[:row])) + list(self.rows[row]).index(place)
            self._spoil_token(token, value, values_alone)

    def _spoil_token(self, token: int, value: float, values_alone: bool) -> None:
        self.new_v[token] = value
        if not values_alone:
            self.new_k[token] = self.q[token] = value

    def part(self, row: int, start: int, stop: int) -> Case:
        """A step that computes a row's queries start .. stop - 1 alone, after steps that computed those before."""
        places = list(self.rows[row])[start:stop]
        one = Case(
            self.form, [places], int(len(places) == 1), self.group.tokens_per_block, device=self.device, lse=self.lse,
            scale_bytes=self.scale_bytes,
        )  # fmt: skip
        one.need = self.need
        one.layer = replace(self.layer, group=one.group)
        first = sum(map(len, self.rows[:row])) + start
        tokens = slice(first, first + len(places))
        one.k, one.v = ([of_row[row][: places[-1] + 1]] for of_row in (self.k, self.v))
        one.q, one.new_k, one.new_v = (x[tokens].contiguous() for x in (self.q, self.new_k, self.new_v))
        return one

    def seeing(self, keys: Keys) -> torch.Tensor:
        """Which queries of real rows see any of these: bool [num_real]."""
        seen = [of_row[:, [p for r, p in keys if r == row]].any(axis=1) for row, of_row in enumerate(self.seen)]
        return torch.from_numpy(np.concatenate(seen)).to(self.device)

    # -- pages -------------------------------------------------------------------------------------------------------
    def _lay_out_pages(self, per_block: int, width: int | None) -> None:
        """Pages in random order. The table names pages full of NaN past each row's end, and where a block has left the
        window."""
        blocks = [-(-int(n) // per_block) for n in self.lengths]
        num_pages = 3 + sum(blocks)
        free = (self.random.permutation(num_pages - 1) + 1).tolist()
        self.poison = free.pop()
        self.full_table = np.full((len(self.rows), width or max(blocks) + 2), self.poison, np.int32)
        self.table = self.full_table.copy()
        self.used = {0}
        for row, count in enumerate(blocks):
            for block in range(count):
                page = free.pop()
                self.used.add(page)
                self.full_table[row, block] = page
                if self.seen[row][:, block * per_block : (block + 1) * per_block].any():
                    self.table[row, block] = page
        page_bytes = NUM_LAYERS * self.group.layer_bytes + self.form.spare_bytes
        self.pool = torch.full((num_pages, page_bytes), 255, dtype=torch.uint8, device=self.device)  # NaN of any float
        self.before = self.pool.clone()
        start = LAYER * self.group.layer_bytes
        self.pages = self.pool[:, start : start + self.group.layer_bytes]

    def _slots(self, row: int, positions: Sequence[int]) -> list[int]:
        per_block = self.group.tokens_per_block
        return [int(self.full_table[row, p // per_block]) * per_block + p % per_block for p in positions]

    # -- batches -----------------------------------------------------------------------------------------------------
    def _batch(self, num_decodes: int, padding_rows: list[int], padding_tokens: int, bound: int) -> AttentionBatch:
        slots = []
        for row, own in enumerate(self.own):
            here = iter(self._slots(row, own))
            slots += [next(here) if is_here else 0 for is_here in self.is_here[row]]
        index = [int(i) for row in self.index for i in row]
        padding = [0] * (sum(padding_rows) + padding_tokens)
        lengths = np.append(self.lengths, np.array(padding_rows, np.int32))
        table = np.concatenate([self.table, np.zeros((len(padding_rows), self.table.shape[1]), np.int32)])
        counts = [len(row) for row in self.rows] + padding_rows
        bounds = np.append(self.lengths + np.int32(bound), np.array(padding_rows, np.int32))
        made = self._made(
            counts, num_decodes + sum(padding_rows), lengths, bounds, table, slots + padding, index + padding
        )
        if self.trees:
            hidden = []
            for row, places in enumerate(self.rows):
                bits = self.trees[row].hidden[-len(places) :] if row in self.trees else []
                hidden += [0] * (len(places) - len(bits)) + bits
            made.hidden = torch.tensor(hidden + padding, dtype=torch.int64, device=self.device)
        return made

    def _history(self) -> AttentionBatch:
        """A step that wrote every position of every row before this one."""
        slots = [slot for r, n in enumerate(self.lengths) for slot in self._slots(r, range(n))]
        index = [i for n in self.lengths for i in range(n)]
        some = self.lengths > 0
        lengths = self.lengths[some]
        return self._made(lengths.tolist(), 0, lengths, lengths.copy(), self.full_table[some], slots, index)

    def _made(
        self,
        counts: list[int],
        num_decodes: int,
        lengths: np.ndarray,
        bounds: np.ndarray,
        table: np.ndarray,
        slots: list[int],
        index: list[int],
    ) -> AttentionBatch:
        start = np.cumsum([0, *counts]).astype(np.int32)
        device = self.device
        return AttentionBatch(
            num_rows=len(counts),
            num_tokens=len(slots),
            num_decodes=num_decodes,
            query_start_loc=torch.from_numpy(start.copy()).to(device),
            query_start_loc_host=start,
            seq_lens=torch.from_numpy(lengths.astype(np.int32)).to(device),
            seq_lens_bound=bounds.astype(np.int32),
            block_table=torch.from_numpy(table.copy()).to(device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            kv_index=torch.tensor(index, dtype=torch.int64, device=device),
            bounds_are_exact=bool((bounds == lengths).all()),
        )

    # -- running -----------------------------------------------------------------------------------------------------
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the step is given."""
        return self.q, self.new_k, self.new_v

    def write_history(self, body: AttentionBackend) -> LayerCache:
        """The layer's cache, with all that earlier steps left in it; this step's own places hold NaN."""
        if self.form.kind == "encoder":
            return LayerCache(self.new_k[:0], self.new_v[:0])
        cache = body.cache(self.need, self.group, self.pages)
        tensors = []
        for values in (self.k, self.v):
            parts = [x.copy() for x in values]
            for part, own in zip(parts, self.own, strict=True):
                part[own] = np.nan
            tensors.append(torch.from_numpy(np.concatenate(parts)).to(self.dtype).to(self.device))
        body.write(self.layer, tensors[0], tensors[1], cache, body.plan(self.history, self.group))
        return cache

    def launch(
        self, body: AttentionBackend, cache: LayerCache, plan: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """This step's `write` and `forward`."""
        if self.form.kind not in ("encoder", "cross"):
            body.write(self.layer, self.new_k, self.new_v, cache, plan)
        if self.scale_bytes:
            self._learn(body, cache)
        if self.form.kind == "cross":
            return body.forward(self.layer, self.q, self.new_k[:0], self.new_v[:0], cache, plan, out, lse)
        body.forward(self.layer, self.q, self.new_k, self.new_v, cache, plan, out, lse)

    def _learn(self, body: AttentionBackend, cache: LayerCache) -> None:
        """Read what keys and values became, which are within half a step of what they were: of the scale by which the
        largest of a vector becomes the largest code, and of the code's own last bit."""
        self.kept = [x.copy() for x in self.k], [x.copy() for x in self.v]
        for row, seen in enumerate(self.seen):
            places = np.flatnonzero(seen.any(axis=0))
            if not len(places):
                continue
            slots = torch.tensor(self._slots(row, places.tolist()), dtype=torch.int64, device=self.device)
            sound = np.isfinite(self.k[row][places] + self.v[row][places]).all(axis=-1)
            for kept, given, found in zip(
                self.kept, (self.k, self.v), body.read(self.group, cache, slots), strict=True
            ):
                wanted = given[row][places]
                kept[row][places] = found.double().cpu().numpy()
                largest = np.abs(wanted).max(axis=-1, keepdims=True)
                if self.kv_dtype == torch.int8:
                    step = np.broadcast_to(largest / 127 / 2, wanted.shape)
                else:
                    step = np.maximum(np.abs(wanted) / 16, largest / 448 / 1024)
                error = np.abs(kept[row][places] - wanted)
                assert (error <= 1.03 * step)[sound].all(), "more than half a step from what was written"

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Room for `forward`: all NaN, so that what is not written shows. No lse where none is asked for."""
        out = torch.full(self.q.shape, torch.nan, dtype=self.dtype, device=self.device)
        return out, self.room_for_lse()

    def room_for_lse(self) -> torch.Tensor | None:
        """The second of `outputs`."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.full(self.q.shape[:2], torch.nan, dtype=dtype, device=self.device) if self.lse else None

    def run(self, body: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out [T, Hq, D] and lse [T, Hq] of the driver."""
        cache = self.write_history(body)
        out, lse = self.outputs()
        self.launch(body, cache, body.plan(self.batch, self.group), out, lse)
        return out, lse

    def check_read(self, body: Any) -> None:
        """What the rows' keys were stored as is read back, from slots in any order, and nothing is changed by it."""
        cache = self.write_history(body)
        self.launch(body, cache, body.plan(self.batch, self.group), *self.outputs())
        places = [np.flatnonzero(seen.any(axis=0)) for seen in self.seen]
        slots = [slot for row, seen in enumerate(places) for slot in self._slots(row, seen.tolist())]
        order, before = self.random.permutation(len(slots)), self.pool.clone()
        found = body.read(self.group, cache, torch.tensor(slots)[order].to(self.device))
        assert torch.equal(self.pool.view(torch.uint8), before.view(torch.uint8)), "reading changed the pool"
        dtype = torch.float32 if self.scale_bytes else self.kv_dtype
        for part, expected in zip(found, self.stored(), strict=True):
            assert part.dtype == dtype, f"{part.dtype} is read of a cache of {self.kv_dtype}"
            whole = np.concatenate([of_row[seen] for of_row, seen in zip(expected, places, strict=True)])
            np.testing.assert_array_equal(part.cpu().double().numpy(), whole[order])
        if self.scale_bytes:
            self._check_written_again(body, cache)

    def _check_written_again(self, body: Any, cache: LayerCache) -> None:
        """What was read and is written again is read as the same."""
        slots, plan = self.history.slot_mapping, body.plan(self.history, self.group)
        found = [part.clone() for part in body.read(self.group, cache, slots)]
        body.write(self.layer, *found, cache, plan)
        for part, again in zip(found, body.read(self.group, cache, slots), strict=True):
            torch.testing.assert_close(again, part, rtol=0, atol=0, equal_nan=True)

    def check_rotated(self, body: Any, rotary: int, normed: bool) -> None:
        """Queries and keys are rotated in so many elements where keys are written, and normed before that: what
        `forward` makes of them, and what is read back, is as if operations had done it."""
        dtype = self.dtype if self.dtype == torch.float64 else torch.float32
        angles = torch.from_numpy(self.random.uniform(-4, 4, (50, rotary // 2)))
        weights = torch.from_numpy(self.random.normal(1, 0.2, (2, self.form.head_size))).to(self.dtype).to(self.device)
        rotation = Rotation(
            torch.from_numpy(self.random.integers(0, 50, len(self.q))).to(self.device),
            torch.cat([angles.cos(), angles.sin()], 1).to(dtype).to(self.device),
            (weights[0], weights[1]) if normed else (),
            1e-5 if normed else 0.0,
        )
        q, k = (_rotated(x, rotation, place) for place, x in enumerate((self.q, self.new_k)))
        cache, plan = self.write_history(body), body.plan(self.batch, self.group)
        out, lse = self.outputs()
        given = body.write_rotated(self.layer, self.q, self.new_k, self.new_v, rotation, cache, plan)
        body.forward(self.layer, *given, self.new_v, cache, plan, out, lse)
        first, tolerance = 0, TOLERANCE[self.form.dtype]
        for row, places in enumerate(self.rows):
            keys = k[first : first + len(places)].double().cpu().numpy()[self.is_here[row]]
            self.k[row][self.own[row]] = self._round(keys)
            slots = torch.tensor(self._slots(row, self.own[row]), dtype=torch.int64, device=self.device)
            found = [part.cpu().double().numpy() for part in body.read(self.group, cache, slots)]
            near = max(tolerance, 1 / 16 if self.scale_bytes else torch.finfo(self.kv_dtype).eps)
            np.testing.assert_allclose(found[0], self.k[row][self.own[row]], rtol=near, atol=near, err_msg="keys")
            exact = 0 if not self.scale_bytes else near
            np.testing.assert_allclose(found[1], self.v[row][self.own[row]], rtol=exact, atol=exact, err_msg="values")
            self.k[row][self.own[row]] = found[0]  # the last bit of an operation is its driver's
            first += len(places)
        self.q = q
        self.check(out, lse)

    def check_move(self, body: Any) -> None:
        """Of each row some keys are moved to the places of others, which may be moved themselves; and nothing else."""
        cache = self.write_history(body)
        self.launch(body, cache, body.plan(self.batch, self.group), *self.outputs())
        sources: list[int] = []
        destinations: list[int] = []
        for row, seen in enumerate(self.seen):
            own = self._slots(row, np.flatnonzero(seen.any(axis=0)).tolist())
            to = self.random.choice(len(own), self.random.integers(1, len(own) + 1), replace=False)
            sources += [own[i] for i in self.random.choice(len(own), len(to))]
            destinations += [own[i] for i in to]
        sources += [*sources[-2:], 0, 0]  # some once more, and twice from the null page to the null page
        destinations += [*destinations[-2:], 0, 0]
        every = [slot for row, seen in enumerate(self.seen) for slot in self._slots(row, range(seen.shape[1]))]
        slots, before = torch.tensor(every).to(self.device), self.pool.clone()
        kept = [part.clone() for part in body.read(self.group, cache, slots)]
        source, destination = (torch.tensor(x).to(self.device) for x in (sources, destinations))
        body.move(self.group, cache, source, destination)
        place = {slot: i for i, slot in enumerate(every)}
        expected = list(range(len(every)))
        for one, other in zip(sources[:-2], destinations[:-2], strict=True):
            expected[place[other]] = place[one]
        for part, was in zip(body.read(self.group, cache, slots), kept, strict=True):
            assert torch.equal(part.view(torch.uint8), was[expected].view(torch.uint8)), "other keys or values"
        self.before = before
        self._check_neighbours()

    def stored(self) -> Sequence[Sequence[np.ndarray]]:
        """What `read` gives: for each of its tensors each row's part, of all its keys."""
        return self.kept or (self.k, self.v)

    def expected(self) -> DenseResult:
        """The dense oracle's, of all real tokens."""
        found, first = [], 0
        keys, values = self.kept or (self.k, self.v)
        for r, places in enumerate(self.index):
            q = self.q[first : first + len(places)].double().cpu().numpy()
            found.append(dense(q, keys[r], values[r], self.ahead[r], self.seen[r], self.layer.scale, self.extras))
            first += len(places)
        return DenseResult(np.concatenate([one.out for one in found]), np.concatenate([one.lse for one in found]))

    def check(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Compare with the dense oracle; padding has to be finite, and nothing beside the layer's pages changed."""
        tolerance, real = TOLERANCE[self.form.dtype], self.num_real
        expected, got = self.expected(), out.double().cpu().numpy()
        np.testing.assert_allclose(got[:real], expected.out, rtol=tolerance, atol=tolerance, err_msg="out")
        if lse is not None:
            near, got_lse = LSE_TOLERANCE[self.form.dtype], lse.double().cpu().numpy()
            np.testing.assert_allclose(got_lse[:real], expected.lse, rtol=near, atol=near, err_msg="lse")
        assert np.isfinite(got[real:]).all(), "the output of padding tokens is not finite"
        if self.form.kind != "encoder":
            self._check_neighbours()

    def _check_neighbours(self) -> None:
        """Other layers, spare bytes and pages that this step does not own are as they were."""
        start, stop = LAYER * self.group.layer_bytes, (LAYER + 1) * self.group.layer_bytes
        assert torch.equal(self.pool[:, :start], self.before[:, :start]), "bytes of the layer before were changed"
        assert torch.equal(self.pool[:, stop:], self.before[:, stop:]), "bytes after the layer's own were changed"
        others = [page for page in range(len(self.pool)) if page not in self.used]
        assert torch.equal(self.pool[others], self.before[others]), "a page of nobody's was written"


def check_unseen(make: Callable[[], Case], body: AttentionBackend, keys: Keys) -> None:
    """Whatever these keys and values are, queries that do not see them give the same bits; and who sees them no number:
    that is how the engine learns of it.

    make: the step; called for each way of spoiling it, and once for the step as it should be.
    """
    clean = make()
    out, lse = clean.run(body)
    clean.check(out, lse)
    real = clean.num_real
    narrow = clean.kv_dtype.itemsize == 1 and not clean.scale_bytes  # where an infinity is a large number
    for values_alone, values in ((True, (np.nan, np.inf)), (False, (np.inf, np.nan))):
        case = make()
        for i, (row, place) in enumerate(keys):
            case.spoil(row, place, values[i % 2], values_alone)
        got, total = case.run(body)
        what = f"{'values' if values_alone else 'keys and values'} of NaN and infinity"
        others = ~case.seeing(keys)
        same = torch.equal(got[:real][others], out[:real][others])
        if total is not None and lse is not None:  # where one is asked for
            same = same and torch.equal(total[:real][others], lse[:real][others])
        assert same, f"{what} had an effect on queries that do not see them"
        assert got[real:].isfinite().all(), f"{what} made the output of padding tokens not finite"
        certain = [key for i, key in enumerate(keys) if values[i % 2] != np.inf or not narrow]
        seen = got[:real][case.seeing(certain)].isfinite()
        assert not seen.any(), f"a query that sees {what} gave numbers"


def check_shares(make: Callable[..., Case], backend: Callable[[str], Any], form: Form) -> None:
    """The results over parts of the keys, put together by lse, are those over all of them.

    make: the step of a form, with the case's further arguments. backend: the body for a dtype.
    """
    whole = make(form)
    if not whole.lse:
        not_served("it gives no lse, by which results are put together")
    if whole.scale_bytes:
        whole.run(backend(form.dtype))  # for what its keys and values become
    for ranks in (2, 3):
        parts = []
        for rank in range(ranks):
            window = None if form.window is None else form.window // ranks
            part = make(replace(form, window=window), share=(rank, ranks))
            out, lse = part.run(backend(form.dtype))
            part.check(out, lse)
            assert lse is not None
            parts.append(DenseResult(out.double().cpu().numpy(), lse.double().cpu().numpy()))
        found = combined(parts)
        whole.check(torch.from_numpy(found.out), torch.from_numpy(found.lse))


class NothingIsRead(TorchFunctionMode):
    """Where work is launched, and none waited for: nobody reads a tensor on the host."""

    reads = frozenset({"cpu", "item", "numpy", "tolist", "__array__", "__bool__", "__float__", "__index__", "__int__"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in self.reads, f"what lies on the device is read on the host, by {name}: that waits for it"
        return func(*args, **(kwargs or {}))


def check_plans_by_launches(
    cases: Sequence[Case], body: Any, record: Callable[[Callable[[], None]], Callable[[], None]] = lambda step: step
) -> None:
    """A plan that is made for the first step, of rows of one token and of the most pages, is refilled for the others
    and right, where the host is not told of them: buffers of the device alone change, as where a whole step is
    replayed.

    record: captures the step, and gives what replays it; else it is run again by a host that knows the first step.
    """
    first = cases[0]
    cache, (out, lse) = first.write_history(body), first.outputs()
    plan = body.plan(first.batch, first.group)

    def step() -> None:
        with NothingIsRead():
            assert body.plan(first.batch, first.group, plan) is plan, "plan(out=) gave another plan"
        first.launch(body, cache, plan, out, lse)

    replay = record(step)
    for case in cases[1:]:
        case.write_history(body)
        first.pool[: len(case.pool)] = case.pool
        for mine, other in zip(first.tensors(), case.tensors(), strict=True):
            mine.copy_(other)
        copy_into(first.batch, case.batch, host=False)
        out.fill_(torch.nan)
        if lse is not None:
            lse.fill_(torch.nan)
        replay()
        case.check(out, lse)


def copy_into(batch: Any, other: Any, host: bool = True) -> None:
    """Fill a batch's buffers, of the device and of the host, with another's of the same shapes; `host` False: the
    device's alone."""
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            value.copy_(getattr(other, name))
        elif isinstance(value, np.ndarray):
            if host:
                value[:] = getattr(other, name)
        else:
            assert value == getattr(other, name) or name == "num_decodes"
    if host:
        batch.num_decodes = other.num_decodes


def whole_rows(
    form: Form, lengths: Sequence[int], device: str, seed: int = 0, padding: int = 0, lse: bool = True
) -> Case:
    """A step of an encoder: every row is whole, and each of its tokens sees all of them, or those in its window."""
    case = Case(
        replace(form, kind="encoder"), [range(n) for n in lengths], 0, form.block_size, device=device, seed=seed,
        padding_tokens=padding, lse=lse,
    )  # fmt: skip
    case.seen = [np.abs(ahead) < (form.window or len(ahead)) for ahead in case.ahead]
    case.group = KVGroup(
        index=0, kind="encoder", sites=(LAYER,), num_kv_heads=form.num_kv_heads, head_size=form.head_size,
        sliding_window=form.window, tokens_per_block=form.block_size, layer_bytes=0, table=None,
        num_q_heads=case.need.num_q_heads,
    )  # fmt: skip
    case.layer = replace(case.layer, group=case.group)
    batch = case.batch
    case.batch = replace(batch, block_table=batch.block_table[:, :0], slot_mapping=torch.zeros_like(batch.slot_mapping))
    return case


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Decode rows, then rows of any number of queries, contiguous or not."""
    decodes = [[n] for n in draw(st.lists(st.integers(0, 60), max_size=5))]
    others: list[Sequence[int]] = []
    for _ in range(draw(st.integers(0 if decodes else 1, 3))):
        if draw(st.booleans()):
            start = draw(st.integers(0, 40))
            others.append(range(start, start + draw(st.integers(1, 20))))
        else:
            others.append(sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=8))))
    rows = [*decodes, *others]
    return {
        "rows": rows,
        "num_decodes": len(decodes),
        "keys": [(row, draw(st.integers(0, places[-1]))) for row, places in enumerate(rows) if draw(st.booleans())],
        "seed": draw(st.integers(0, 2**32)),
        "padding_tokens": draw(st.sampled_from([0, 0, 3])),
        "bound": draw(st.sampled_from([0, 0, 4])),
        "strided": draw(st.booleans()),
    }


def _rotated(x: torch.Tensor, rotation: Rotation, place: int) -> torch.Tensor:
    """x [T, heads, head_size] by the formulas of operations `rms_norm` and `rope`, in float64."""
    wide, (cos, sin) = x.double(), rotation.cos_sin[rotation.positions].double().unsqueeze(1).chunk(2, dim=-1)
    if rotation.norms:
        wide = wide / (wide.square().mean(-1, keepdim=True) + rotation.eps).sqrt() * rotation.norms[place].double()
    half = cos.shape[-1]
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)
