"""Point `attention`: attention over a paged KV cache. One driver is chosen for each kind of layer.

The body of a driver is an `AttentionBackend` (below); of one that serves layers of kind "mla", which keep one latent
vector a token, a `LatentAttentionBackend` (`latent_attention.py`). Cards, needs, batches and layers are the same.

Minor version 1 made `lse` a feature, which a driver may refuse; 2 added `read`; 3 the feature "tree", with `move`; 4
the kind "cross", and the feature "relative_bias"; 5 `AttentionBatch.any_rows`; 6 the feature "two_sided"; 7
`write_rotated`, which a driver need not have; 8 `scale_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from engine.interfaces.platform import STREAM
from engine.plugin import Card
from engine.types.kv import KVGroup, kv_heads_on_rank
from engine.types.model import KVSpec

if TYPE_CHECKING:
    import numpy as np
    import torch

    from engine.interfaces.context import WorkerContext

CaptureLevel = Literal["none", "decode", "uniform", "any"]
"""Which steps may be captured: none; one token a row; the same number of tokens in every row; any."""


@dataclass(frozen=True, kw_only=True)
class AttentionNeed:
    """What the engine asks of attention for one form of layer.

    Args:
        kind: see `engine.types.model.KVKind`.
        head_size: elements of one head; of the cached vector for kind "mla".
        num_q_heads, num_kv_heads: on this rank; the first is a multiple of the second.
        dtype: of queries and outputs; `kv_dtype`: of the cache.
        device: torch's device string.
        block_size: tokens of a block of the KV cache, which pages hold a multiple of.
        sliding_window: tokens that a query sees, itself included; of kind "encoder" as many to each side. None for all.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None for none.
        features: further demands: "kv_index" (a row's queries need not be its last keys, and may see none: see
            `AttentionBatch.kv_index`), "tree" (drafts may branch: see `AttentionBatch.hidden`; a sliding window is
            longer than any path through a tree then), "sinks", "alibi" and "relative_bias" (layers that have them, see
            `AttentionLayer`), "two_sided" (a sliding window in layers of kind "encoder"), "lse" (`forward` is asked for
            the logarithms of its sums, by which results over parts of a row's keys are put together: where ranks share
            sequences).
        framework: "torch" or "jax".
        rope_size: of kind "mla", how many of the last of `head_size` elements are the key with rotary positions; the
            others are the latent.
        batch_invariant: a row's results have to have the same bits in every batch, see `engine.plugin.Card`.
    """

    kind: str
    head_size: int
    num_q_heads: int
    num_kv_heads: int
    dtype: str
    kv_dtype: str
    device: str
    block_size: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    features: frozenset[str] = field(default_factory=frozenset)
    framework: str = "torch"
    rope_size: int = 0
    batch_invariant: bool = False

    @classmethod
    def of(cls, site: KVSpec, size: int, shared: int = 1, **facts: Any) -> AttentionNeed:
        """What a layer asks on each of `size` ranks.

        Args:
            site: one of `ModelDescription.sites`.
            shared: ranks that share the tokens of each sequence.
            facts: what is not the layer's: dtypes, device, block size, features, framework.

        Raises ConfigError where KV heads can be neither divided over the ranks nor copied evenly.
        """
        size = size if site.divided else 1
        if site.kind == "cross":
            facts["features"] |= {"kv_index"}
        if site.kind == "encoder" and site.sliding_window is not None:
            facts["features"] |= {"two_sided"}
        if shared > 1:
            facts["features"] |= {"kv_index", "lse"}
        return cls(
            kind=site.kind,
            head_size=site.head_size,
            num_q_heads=site.num_q_heads // size,
            num_kv_heads=kv_heads_on_rank(site.num_kv_heads, size),
            sliding_window=site.sliding_window and max(1, site.sliding_window // shared),
            soft_cap=site.soft_cap,
            rope_size=site.rope_size,
            **facts,
        )


class AttentionCard(Card):
    """Describes an attention driver: which kinds of layer it serves, how it wants pages cut, and what lies in them.

    `captured_by` names the recorders (`engine.interfaces.platform.PlatformCard.recorder`) that see all that it
    launches; which steps they may capture is the body's `capture_level`.
    """

    kinds: frozenset[str] = frozenset()
    captured_by: frozenset[str] = STREAM

    @classmethod
    def tokens_per_page(cls, need: AttentionNeed) -> int:
        """Tokens for each page, which may come to hold a multiple of them: `need.block_size` where the kernel can.

        A kernel that cannot says so in `unsupported`, or answers with the nearest size that it can.
        """
        return need.block_size

    @classmethod
    def scale_bytes(cls, need: AttentionNeed) -> int:
        """Bytes of the number in a page that a token's key of a head is multiplied with when it is read; its value has
        another. 0 for none, as always of kind "mla"."""
        return 0

    @classmethod
    def page_format(cls, need: AttentionNeed) -> str:
        """A name for how a layer's keys and values lie in a page. Where it is the same in two engines, with layers and
        pages of the same form, the bytes of one are those of the other.

        "" stands for the driver's name, version and options, so that nobody else's pages count as the same. A driver
        whose bytes lie as another's do, or as those of its other versions, gives that a name.
        """
        return ""


class LayerCache(NamedTuple):
    """One layer's strided views of the pool, in the layout that the driver chose.

    Args:
        k, v: the first dimension is the page; the others are the driver's.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One layer, as attention sees it.

    Args:
        index: in the model.
        group: its KV group.
        need: its group's.
        scale: scores are q . k * scale.
        sinks: float32 [num_q_heads] on the device; for each query head one more score, of a key that is always seen and
            whose value is 0: it takes weight away from the others (Xiao et al. 2023). Neither scaled nor capped.
        alibi_slopes: float32 [num_q_heads] on the device; slope * |place of the query - place of the key| is taken away
            from a score, after the soft cap (Press, Smith, Lewis 2022).
        relative_bias: float32 [num_q_heads, 2 D + 1] on the device, contiguous; relative_bias[head, D + d] is added to
            a score, after the soft cap, where d, within -D .. D, is the key's place less the query's (T5; Raffel et al.
            2020).
    """

    index: int
    group: KVGroup
    need: AttentionNeed
    scale: float
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    relative_bias: torch.Tensor | None = None


@dataclass(kw_only=True)
class AttentionBatch:
    """One step, as the groups of one KV table see it: R rows, T tokens, both padded to the bucket.

    Args:
        num_rows, num_tokens: R and T.
        num_decodes: the first rows, which have exactly one token each.
        query_start_loc: int32 [R + 1], device; row r's queries are tokens query_start_loc[r] .. [r + 1] - 1.
        query_start_loc_host: the same with numpy.
        seq_lens: int32 [R], device; keys of the row, those of this step included. Exact. With the feature "kv_index"
            0 for a row none of whose keys is here; without a block then.
        seq_lens_bound: int32 [R], numpy; the same or more.
        block_table: int32 [R, max_blocks], device; entries past the row's blocks are not to be read, and entries that
            left a sliding window are stale.
        slot_mapping: int64 [T], device; where each token's K and V go: page * tokens_per_block + offset. The null page
            takes what is not kept here.
        kv_index: int64 [T], device; each query's place among its row's keys: it sees keys 0 .. kv_index, and none where
            that is -1. Without the feature "kv_index" a row's queries are its last keys, and drivers need not read it.
        hidden: int64 [T], device; bit b, 1 .. 63, of a query at kv_index i is set where it does not see key i - b. None
            where no query has any, as always without the feature "tree". Nodes of a tree of drafts stand one behind the
            other, and see those that they follow. The others count for no distance: a query's position is its kv_index
            less the number of its bits, its sliding window begins that much earlier, and a slope is for the keys
            between that it sees. The first `num_decodes` rows have no bits; a row of one token behind them may.
        bounds_are_exact: `seq_lens_bound` says what `seq_lens` says.
        any_rows: the step is captured with rows of any numbers of tokens: its plan is refilled for others, of no tokens
            too, and with tokens after the last row. Only where `capture_level` is "any".

    A row of fewer drafts may be padded to the others' number of tokens: what pads it writes to the null page, has the
    kv_index -1, and gives an output that nobody reads.

    Where ranks share a row's keys (context parallel), token p's key lies on rank p % n, at place p // n; a query at p
    sees the first (p - rank) // n + 1 keys of a rank, all the same whether its own key is among them.
    """

    num_rows: int
    num_tokens: int
    num_decodes: int
    query_start_loc: torch.Tensor
    query_start_loc_host: np.ndarray
    seq_lens: torch.Tensor
    seq_lens_bound: np.ndarray
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    kv_index: torch.Tensor
    hidden: torch.Tensor | None = None
    bounds_are_exact: bool = False
    any_rows: bool = False


class Rotation(NamedTuple):
    """What becomes of a step's queries and keys before they are used.

    Args:
        positions: int64 [T].
        cos_sin: float32 or float64 [max_position, rotary_dim], see `engine.interfaces.ops.Ops.rope`.
        norms: weights [head_size] of the norms of queries' heads and of keys', which come first; empty: there are none.
        eps: of the norms.
    """

    positions: torch.Tensor
    cos_sin: torch.Tensor
    norms: tuple[torch.Tensor, ...] = ()
    eps: float = 0.0


class AttentionBackend(Protocol):
    """Attention at work, one body for each kind of layer. Built with a `WorkerContext`."""

    capture_level: CaptureLevel

    def __init__(self, context: WorkerContext) -> None: ...

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> LayerCache:
        """A layer's views of its part of the pool.

        Args:
            pages: uint8 [num_pages, layer_bytes], strided: rows lie `page_bytes` apart.
        """

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        """Prepare one step for one group; once a step. With `out`, an earlier plan, the same buffers are refilled
        without allocation or synchronisation and `out` is returned: it was made for the same R and T and for a step
        that is captured, so what was launched on it must stay right for longer rows. Where a body has
        `plans_by_launches`, True, a refill for rows of one token is launches alone: it may be captured (minor 9)."""

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: Any) -> None:
        """Store k, v [T, num_kv_heads, head_size] at `slot_mapping`. Padding tokens write to the null page.

        They may hold NaN and infinities, which must not reach queries that do not see them (see `forward`). Where a
        kernel multiplies what is not seen by 0, a value that is not finite is best stored as zeros, and its key as NaN:
        the score of a key that is not seen is overwritten.
        """

    def write_rotated(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        cache: LayerCache,
        plan: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`write` of the keys that the operation `rope` makes of q [T, num_q_heads, head_size] and k, or `qk_norm_rope`
        where there are norms: in one launch instead of two. Who has no such method is spared it.

        Returns what `forward` is to be given as q and k: perhaps in the memory of q and k, which nobody reads again.
        """

    def read(self, group: KVGroup, cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was stored at `slots`, int64 [n], device, in the numbers of `slot_mapping`, in any order.

        Returns new tensors k, v [n, num_kv_heads, head_size] of the cache's dtype; multiplied with their
        scales where the card keeps any, in float32. Not called in captured steps.
        """

    def move(self, group: KVGroup, cache: LayerCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Store at slots `destination` what was stored at slots `source`, bit for bit; int64 [n] both, device.

        All is read before anything is written: a slot may be among both. A destination that is there twice has one
        source, but for those on the null page. Of a driver that serves "tree"; not called in captured steps.
        """

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        plan: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Causal attention of every row over its own keys, those just written included.

        q [T, num_q_heads, head_size], k and v [T, num_kv_heads, head_size] (this step's, already in the cache);
        out like q, written in full (padding too, with finite values); lse [T, num_q_heads], the natural logarithm of
        the sum of exponentials of the scores, a sink's included: written where given, and given to drivers alone that
        serve a need with the feature "lse"; of float64 where q is, else of float32, in which scores are computed. A
        query at kv_index i sees keys max(0, i - sliding_window + 1) .. i; one at -1 sees none: its out is 0, its lse
        -inf, or its sink's score. Keys and values that a query does not see have no effect, not on a bit, NaN and
        infinities included (0 * NaN is NaN), also where other queries of its row see them. What it makes of a NaN or an
        infinity among the values that it sees is not finite: so the engine learns of it.

        Layers of kind "encoder" keep nothing: `cache` and `write` are not called, `cache` is empty here, the batch's
        block table has no column and its slot mapping means nothing. Each row is whole, and each of its queries sees
        all of its keys, before and after; with a sliding window those less than `sliding_window` places away.

        Layers of kind "cross" have written what their encoder left, and their queries' own keys are none: k and v are
        empty, a row may have more queries than keys, and every query sees all of them, as its kv_index says.
        """
