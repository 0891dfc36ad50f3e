"""Latent attention (point `attention`, kind "mla"): the body of a driver for layers that cache one vector a token.

Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) keeps, of each token, a latent c [C] from which every
head's key and value are made, k = W_UK c and v = W_UV c, and one rotated key r [P] that all heads share. The cache
holds the vector (c, r): C + P elements for all heads together, num_kv_heads 1, on every rank the same.

**Queries come absorbed.** q . (W_UK c) equals (W_UK^T q) . c, so the model multiplies a head's query by its W_UK once,
and attention is that of many query heads over one key head: scores are (q_latent . c + q_rope . r) * scale, the value
is c itself, the first C elements of the key that was just read. The model multiplies the result by W_UV afterwards.

**Prefill is absorbed too.** Expanding cached latents to keys and values makes a score cheaper (with DeepSeek's sizes
320 multiplications and additions a head instead of 1088), but each key costs W_UK and W_UV first (131,072 a head), and
a chunk of a prompt would expand all of its context again. It pays from about 170 queries a key on: in chunks longer
than that, of prompts. Until that is measured, one form serves decodes, drafts and chunks alike, gives the same sums
for all of them, and needs no room for expanded keys. A second method for long chunks would be an addition
(`requires_minor`), which needs the projections beside the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, CaptureLevel
from engine.types.kv import KVGroup

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext


class LatentAttentionBackend(Protocol):
    """Latent attention at work. Built with a `WorkerContext`.

    C = head_size - rope_size and P = rope_size, of the layer's need. Heads are divided over ranks: a rank has the
    num_q_heads of its need, and the whole cache. Batches, plans, `kv_index` and captures mean what they mean in
    `engine.interfaces.attention.AttentionBackend` ("there").
    """

    capture_level: CaptureLevel

    def __init__(self, context: WorkerContext) -> None: ...

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> torch.Tensor:
        """A layer's view of its part of the pool, uint8 [num_pages, layer_bytes] as there: the first dimension is the
        page, the others are the driver's."""

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        """Prepare one step for one group, as there: once a step, and with `out` in an earlier plan's buffers."""

    def write(
        self, layer: AttentionLayer, latent: torch.Tensor, rope_key: torch.Tensor, cache: torch.Tensor, plan: Any
    ) -> None:
        """Store latent [T, C] (normed) and rope_key [T, P] (rotated) at `slot_mapping`, rounded to the cache's dtype.
        Padding tokens write to the null page. Both may be views of wider rows."""

    def read(self, group: KVGroup, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was stored at `slots`, int64 [n], device: new tensors latent [n, C] and rope_key [n, P] of the cache's
        dtype; see `engine.interfaces.attention.AttentionBackend.read`."""

    def forward(
        self,
        layer: AttentionLayer,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Causal attention of every row over its own vectors, those just written included.

        q_latent [T, num_q_heads, C], q_rope [T, num_q_heads, P] (either may be a view of a wider tensor); out
        [T, num_q_heads, C], written in full (padding too, with finite values): the mean of the latents by the weights
        of their scores; lse [T, num_q_heads], the natural logarithm of the sum of exponentials of the scores, given
        where the need has the feature "lse", of float64 where queries are, else of float32. A query at kv_index i sees
        vectors 0 .. i, one at -1 none: its out is 0, its lse -inf. What it does not see has no effect, and NaN that it
        sees does, as `engine.interfaces.attention.AttentionBackend.forward` says.
        """
