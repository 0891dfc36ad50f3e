"""The compiled functions of a worker: each bucket's step, and what changes the device's tables.

Everything that lives from step to step (pools, block tables, the table of tokens) is given to the functions and comes
back: their memory is donated, so it stays where it is. Functions are compiled ahead of time, one for each bucket; a
bucket that was not is compiled when it is met, counted, and told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from engine.types.kv import KVLayout
from engine.types.params import MAX_LOGPROBS
from engine_tpu import attention
from engine_tpu.attention import Blocks, Form, Writes, as_stored, held, write_pages, write_tokens
from engine_tpu.buckets import SAMPLED, Bucket, Packing, drawing_views
from engine_tpu.models.decoder import Decoder, specs
from engine_tpu.sampling import Asked, Logprobs, Masks, SampledRows, draw, logprobs
from engine_tpu.weights import AXIS, Params, Shards

logger = logging.getLogger(__name__)

ENTERED = 1024
"""Ids of one turn of `enter`, at most."""
PLACED = 1024
"""New pages of one turn of `place`."""
PUT = 256
"""Tokens of one turn of `put`."""
COPIED = 64
"""Pages of one turn of `copy`."""
SCORED = 128
"""Prompt tokens whose logits are in memory at once."""
_HEADER = 4

Edit = Callable[[jax.Array, jax.Array], jax.Array]
"""Edited logits, of the logits of a step's draws and of the numbers that these read."""


class Site(NamedTuple):
    """Where a layer's keys and values lie, and how it attends: its pool, its block table, its form."""

    pool: int
    table: int
    form: Form


@dataclass
class Memory:
    """What lives on the device from step to step.

    Attributes:
        pools: of each layer of a table [pages, 2 * Hkv, page size, D]; the tables share them, page by page. In the
            cache's dtype, or on a processor the bits of it, see `engine_tpu.attention.held`.
        blocks: int32 [tables, slots + 1, W]; the block tables.
        tokens: int32 [slots + 1, L + 1]; each slot's tokens.
    """

    pools: tuple[jax.Array, ...]
    blocks: jax.Array
    tokens: jax.Array


class Forwarded(NamedTuple):
    """What the model left of a step.

    Args:
        hidden: [T, H]; the hidden states.
        logits: [N, V]; of the positions that draw.
        following: int32 [N]; what stands in the table of tokens where each draw is to go.
        drawing: of the numbers that were sent those that the drawing reads.
    """

    hidden: jax.Array
    logits: jax.Array
    following: jax.Array
    drawing: jax.Array


class Compiled:
    """Functions that were compiled, by key.

    Attributes:
        met: how many had to be compiled in service.
    """

    def __init__(self) -> None:
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        self._serving = False
        self.met = 0

    def serve(self) -> None:
        """From now on a compilation makes requests wait."""
        self._serving = True

    def forget(self) -> None:
        """All of them: the pool has another size from now on."""
        self._functions.clear()

    def __call__(self, key: Hashable, make: Callable[[], Any], *arguments: Any) -> Any:
        """The function's result. make: jax.jit's answer, to be compiled for these arguments; once for each key."""
        function = self._functions.get(key)
        if function is None:
            function = self.compile(key, make, *arguments)
        return function(*arguments)

    def compile(self, key: Hashable, make: Callable[[], Any], *arguments: Any) -> Callable[..., Any]:
        """Compile it, if it is not."""
        if key in self._functions:
            return self._functions[key]
        began = time.monotonic()
        found: Callable[..., Any] = make().lower(*arguments).compile()
        self._functions[key] = found
        if self._serving:
            self.met += 1
            seconds = time.monotonic() - began
            logger.warning("%s was not compiled at the start: requests waited %.1f s for it", key, seconds)
        return found


class Steps:
    """A model's steps on a mesh.

    Args:
        model: what computes; params: its arrays.
        layout: of the cache; sites: of each layer, see `sites_of`.
        slots, max_model_len: how many requests run at once, and how long they are.
        cache_dtype: of keys and values.
        attend: attention over the cache: `engine_tpu.attention.attend`, or another that computes the same.

    Attributes:
        whole: of arrays that every device has.
        page_size: tokens of a page.
        kv_heads: of keys, all devices'; each counts once, however many devices have it.
        compiled: the functions.
    """

    def __init__(
        self,
        model: Decoder,
        params: Params,
        shards: Shards,
        layout: KVLayout,
        sites: Sequence[Site],
        slots: int,
        max_model_len: int,
        cache_dtype: np.dtype,
        attend: Callable[..., jax.Array],
    ) -> None:
        self._model = model
        self.params = params
        self._shards = shards
        self._sites = tuple(sites)
        self._slots = slots
        self._length = max_model_len
        self._cache_dtype = cache_dtype
        self._attend = attend
        self.whole = NamedSharding(shards.mesh, PartitionSpec())
        self._divided = NamedSharding(shards.mesh, self.by_head(1))
        by_xla = attend is attention.attend
        self._held = held(cache_dtype, self.devices[0].platform) if by_xla else cache_dtype
        self._num_tables = len(layout.tables)
        self.page_size = layout.tables[0].tokens_per_block
        self.kv_heads = layout.groups[0].num_kv_heads
        self._head_size = layout.groups[0].head_size
        self._packings: dict[Bucket, Packing] = {}
        self.compiled = Compiled()

    # -- memory ------------------------------------------------------------------------------------------------------
    @property
    def page_bytes(self) -> int:
        """Of one page, all layers' and all devices'."""
        heads = 2 * self._model.kv_heads * self._shards.size
        layer = heads * self.page_size * self._head_size * self._cache_dtype.itemsize
        return layer * (1 + max(site.pool for site in self._sites))

    @property
    def devices(self) -> list[jax.Device]:
        """Of the mesh."""
        return list(self._shards.mesh.devices.flat)

    def memory(self, num_pages: int) -> Memory:
        """Pools of so many pages, and empty tables."""
        shapes = self.memory_shapes(num_pages)

        def make() -> Any:
            return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)

        return Memory(*jax.jit(make, out_shardings=jax.tree.map(lambda one: one.sharding, shapes))())

    def memory_shapes(self, num_pages: int) -> tuple[Any, ...]:
        """The arrays of `memory` as `jax.ShapeDtypeStruct`, in its order."""
        shape = (num_pages, 2 * self._model.kv_heads * self._shards.size, self.page_size, self._head_size)
        pool = jax.ShapeDtypeStruct(shape, self._held, sharding=self._divided)
        pools = (pool,) * (1 + max(site.pool for site in self._sites))
        width = -(-self._length // self.page_size)
        tables = (self._num_tables, self._slots + 1, width), (self._slots + 1, self._length + 1)
        return pools, *(jax.ShapeDtypeStruct(one, jnp.int32, sharding=self.whole) for one in tables)

    def by_head(self, dim: int | None) -> PartitionSpec:
        """That of an array whose dimension `dim` are heads; None: of one that every device has whole."""
        return PartitionSpec(*(None,) * dim, AXIS) if dim is not None and self._shards.size > 1 else PartitionSpec()

    def send(self, array: np.ndarray, spec: PartitionSpec | None = None) -> jax.Array:
        """Start a copy to every device, or to each of its part. The array is JAX's from then on: nobody may change
        it."""
        return jax.device_put(array, self.whole if spec is None else NamedSharding(self._shards.mesh, spec))

    def jit(self, function: Callable[..., Any], in_specs: Any, out_specs: Any, donate_argnums: Any = ()) -> Any:
        """What each device computes of its parts, as `jax.jit` answers."""
        if self._shards.size > 1:
            function = jax.shard_map(
                function, mesh=self._shards.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        return jax.jit(function, donate_argnums=donate_argnums)

    # -- the step ----------------------------------------------------------------------------------------------------
    def packing(self, bucket: Bucket) -> Packing:
        """How a bucket's numbers travel."""
        if bucket not in self._packings:
            self._packings[bucket] = Packing(bucket, self._num_tables, self.page_size, self._slots)
        return self._packings[bucket]

    def forward(self, memory: Memory, bucket: Bucket, packed: jax.Array) -> Forwarded:
        """Compute the tokens of a step."""
        arguments = self.params, memory.pools, memory.blocks, memory.tokens, packed
        make = partial(self.jit_forward, bucket)
        memory.pools, memory.blocks, *found = self.compiled(bucket, make, *arguments)
        return Forwarded(*found)

    def jit_forward(self, bucket: Bucket) -> Any:
        whole, pools = PartitionSpec(), (self.by_head(1),) * (1 + max(site.pool for site in self._sites))
        in_specs = specs(self.params), pools, whole, whole, whole
        return self.jit(partial(self._forward, bucket), in_specs, (pools, *(whole,) * 5), donate_argnums=(1, 2))

    def _forward(
        self,
        bucket: Bucket,
        params: Params,
        pools: tuple[jax.Array, ...],
        blocks: jax.Array,
        tokens: jax.Array,
        packed: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        packing = self.packing(bucket)
        part = packing.views(packed)
        blocks = blocks.at[part["new_table"], part["new_slot"], part["new_index"]].set(part["new_page"])
        tables = blocks[:, part["slot"]]  # [tables, R, W]
        arange = jnp.arange(bucket.rows, dtype=jnp.int32)
        if bucket.decodes:
            slot, position = part["slot"], part["position"]
            queries = Blocks(arange, arange, (slot < self._slots).astype(jnp.int32), position, arange, 1)
        else:
            slot, position = part["token_slot"], part["token_position"]
            row, first, count, begin = (part[f"block_{name}"] for name in ("row", "first", "count", "position"))
            queries = Blocks(row, first, count, begin, part["token_place"], bucket.queries)
        written = list(pools)

        def attend(layer: int, q: jax.Array, kv: jax.Array) -> jax.Array:
            site = self._sites[layer]
            pool, kv = written[site.pool], as_stored(kv, self._cache_dtype).view(self._held)
            if bucket.decodes:
                page = tables[site.table, arange, position // self.page_size]
                pool = write_tokens(pool, kv, page, position % self.page_size)
            else:
                page = tables[site.table, part["piece_row"], part["piece_index"]]
                page = jnp.where(part["piece_high"] > part["piece_low"], page, 0)
                pieces = Writes(page, part["piece_token"], part["piece_low"], part["piece_high"])
                pool = write_pages(pool, kv, pieces)
            written[site.pool] = pool
            return self._attend(q, pool, tables[site.table], queries, site.form)

        hidden = self._model.hidden(params, tokens[slot, position], position, attend)
        logits = self._model.logits(params, hidden if bucket.decodes else hidden[part["select"]])
        following = tokens[part["draw_slot"], part["draw_place"]]
        return tuple(written), blocks, hidden, logits, following, packed[packing.drawing]

    def draw(self, memory: Memory, given: Forwarded, masks: Masks | None) -> tuple[jax.Array, Logprobs]:
        """Draw the tokens of a step; see `engine_tpu.sampling.draw`."""
        key = f"the draw of {len(given.logits)} tokens" + ("" if masks is None else ", masked")
        arguments = given.logits, memory.tokens, given.following, given.drawing, masks
        memory.tokens, told, found = self.compiled(key, partial(jit_draw, self.whole), *arguments)
        return told, found

    def masks(self, ends: np.ndarray, allowed: np.ndarray, edited: jax.Array) -> Masks:
        """Send masks, uint32 [N, ceil(V / 32)]. edited: see `Masks`."""
        return Masks(self.send(ends), self.send(allowed), edited)

    def run_padding(self, memory: Memory, bucket: Bucket, edit: Edit = lambda logits, drawing: logits) -> None:
        """Compile a bucket's step and draws and run them on padding, with all that rows may ask of the drawing."""
        packed, views = self.packing(bucket).array()
        views["flags"][:] = 1
        views["repetition"][:] = np.ones(1, np.float32).view(np.int32)
        given = self.forward(memory, bucket, self.send(packed))
        words = np.zeros((bucket.draws, -(-given.logits.shape[1] // 32)), np.uint32)
        for masks in (None, self.masks(words, ~words, edit(given.logits, given.drawing))):
            told, _ = self.draw(memory, given, masks)
        told.block_until_ready()

    # -- tables ------------------------------------------------------------------------------------------------------
    def enter(self, memory: Memory, slot: int, ids: np.ndarray) -> None:
        """A request with these tokens enters a slot; its block tables are empty."""
        width = min(ENTERED, self._length + 1)
        for first in range(0, len(ids), width):
            piece = ids[first : first + width]
            packed = np.zeros(_HEADER + width, np.int32)
            packed[:_HEADER] = slot, first, len(piece), first == 0
            packed[_HEADER : _HEADER + len(piece)] = piece
            arguments = memory.tokens, memory.blocks, self.send(packed)
            memory.tokens, memory.blocks = self.compiled("enter", partial(_jit_enter, self.whole), *arguments)

    def put(self, memory: Memory, entries: np.ndarray) -> None:
        """Write tokens: int32 [3, n], slots, places and ids. None: padding."""
        for first in range(0, max(1, entries.shape[1]), PUT):
            packed = np.zeros((3, PUT), np.int32)
            packed[0] = self._slots
            piece = entries[:, first : first + PUT]
            packed[:, : piece.shape[1]] = piece
            memory.tokens = self.compiled("put", partial(_jit_put, self.whole), memory.tokens, self.send(packed))

    def place(self, memory: Memory, entries: np.ndarray) -> None:
        """Write new pages into the block tables: int32 [4, n], tables, slots, indices and pages. None: padding."""
        for first in range(0, max(1, entries.shape[1]), PLACED):
            packed = np.zeros((4, PLACED), np.int32)
            packed[1] = self._slots
            piece = entries[:, first : first + PLACED]
            packed[:, : piece.shape[1]] = piece
            memory.blocks = self.compiled("place", partial(_jit_place, self.whole), memory.blocks, self.send(packed))

    def copy(self, memory: Memory, source: np.ndarray, destination: np.ndarray) -> None:
        """Copy whole pages, int32 [n] each; none is on both sides. None: a page of padding."""
        for first in range(0, max(1, len(source)), COPIED):
            piece = slice(first, first + COPIED)
            packed = np.zeros((2, COPIED), np.int32)
            packed[0, : len(source[piece])], packed[1, : len(source[piece])] = source[piece], destination[piece]
            memory.pools = self.compiled("copy", self._jit_copy, memory.pools, self.send(packed))

    def _jit_copy(self) -> Any:
        def function(pools: tuple[jax.Array, ...], packed: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(pool.at[packed[1]].set(pool[packed[0]]) for pool in pools)

        return jax.jit(function, donate_argnums=0, out_shardings=self._divided)

    def score(self, memory: Memory, hidden: jax.Array, packed: np.ndarray) -> Logprobs:
        """Log probabilities of the tokens at int32 [SCORED] slots and places, packed[1:], given the hidden states of
        the step's tokens packed[0]."""
        arguments = self.params, hidden, memory.tokens, self.send(packed)
        found: Logprobs = self.compiled(f"prompt logprobs of {len(hidden)} tokens", self._jit_score, *arguments)
        return found

    def _jit_score(self) -> Any:
        def function(params: Params, hidden: jax.Array, tokens: jax.Array, packed: jax.Array) -> Logprobs:
            logits = self._model.logits(params, hidden[packed[0]])
            return logprobs(logits, tokens[packed[1], packed[2]], min(MAX_LOGPROBS, logits.shape[1]))

        whole = PartitionSpec()
        return self.jit(function, (specs(self.params), whole, whole, whole), Logprobs(*(whole,) * 4))


def sites_of(layout: KVLayout, num_layers: int, form: Callable[[int], Form]) -> list[Site]:
    """Where each layer's cache lies. form: of a layer."""
    sites: dict[int, Site] = {}
    for group in layout.groups:
        assert group.table is not None
        for nth, layer in enumerate(group.sites):
            sites[layer] = Site(group.offset // group.layer_bytes + nth, group.table, form(layer))
    return [sites[layer] for layer in range(num_layers)]


_SAMPLED_DTYPES = (*(jnp.int32,) * 3, *(jnp.float32,) * 6, jnp.int32, jnp.uint32, jnp.uint32)


def _as(bits: jax.Array, dtype: Any) -> jax.Array:
    return bits if dtype == jnp.int32 else lax.bitcast_convert_type(bits, dtype)


def jit_draw(whole: NamedSharding) -> Any:
    def function(
        logits: jax.Array, tokens: jax.Array, following: jax.Array, packed: jax.Array, masks: Masks | None
    ) -> tuple[jax.Array, jax.Array, Logprobs]:
        part = drawing_views(packed, len(logits))
        rows = SampledRows(*(_as(part[name], dtype) for name, dtype in zip(SAMPLED, _SAMPLED_DTYPES, strict=True)))
        return draw(logits, tokens, following, rows, Asked(*(part["flags"] > 0)), masks)

    return jax.jit(function, donate_argnums=(1,), out_shardings=whole)


def _jit_enter(whole: NamedSharding) -> Any:
    def function(tokens: jax.Array, blocks: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        slot, first, count, resets = packed[:_HEADER]
        ids = packed[_HEADER:]
        place = jnp.arange(len(ids), dtype=jnp.int32)
        place = jnp.where(place < count, first + place, tokens.shape[1])
        cleared = jnp.where(resets > 0, 0, blocks[:, slot])
        return tokens.at[slot, place].set(ids, mode="drop"), blocks.at[:, slot].set(cleared)

    return jax.jit(function, donate_argnums=(0, 1), out_shardings=(whole, whole))


def _jit_put(whole: NamedSharding) -> Any:
    def function(tokens: jax.Array, packed: jax.Array) -> jax.Array:
        return tokens.at[packed[0], packed[1]].set(packed[2])

    return jax.jit(function, donate_argnums=0, out_shardings=whole)


def _jit_place(whole: NamedSharding) -> Any:
    def function(blocks: jax.Array, packed: jax.Array) -> jax.Array:
        return blocks.at[packed[0], packed[1], packed[2]].set(packed[3])

    return jax.jit(function, donate_argnums=0, out_shardings=whole)
