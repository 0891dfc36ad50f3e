"""Attention without a cache, against dense float64: every token of a row sees all tokens of the row."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, LayerCache
from engine.interfaces.context import WorkerContext
from engine.types.kv import KVGroup
from engine_reference.attention_torch import attention as attention_module
from engine_reference.attention_torch.attention import TorchAttentionBody

SIZE = 6


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, cap: float | None, sinks: np.ndarray, slopes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    k, v = (x.repeat(q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("nhd,shd->nhs", q, k) * scale
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    place = np.arange(len(q))
    scores = scores - slopes[:, None] * np.abs(place - place[:, None])[:, None]
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks)[:, None]
    return np.einsum("nhs,shd->nhd", weights / total, v), np.log(total)[..., 0]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("at_once", [1 << 24, 40])
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_whole_rows(
    monkeypatch, dtype: torch.dtype, features: bool, at_once: int, group: int, cap: float | None, padding: int
) -> None:
    """Rows of several lengths, queries in chunks where there are many; padding comes out finite."""
    monkeypatch.setattr(attention_module, "MAX_SCORES", at_once)
    heads, lengths = 2, (5, 1, 17, 9)
    bounds = np.append(0, np.cumsum(lengths)).astype(np.int32)
    total = int(bounds[-1]) + padding
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(total, n, SIZE, dtype=torch.float64, generator=generator).to(dtype)
        for n in (heads * group, heads, heads)
    )
    need = AttentionNeed(
        kind="encoder", head_size=SIZE, num_q_heads=heads * group, num_kv_heads=heads, dtype=str(dtype)[6:],
        kv_dtype=str(dtype)[6:], device="cpu", block_size=4, soft_cap=cap,
    )  # fmt: skip
    kv_group = KVGroup(
        index=0, kind="encoder", sites=(0,), num_kv_heads=heads, head_size=SIZE, sliding_window=None,
        tokens_per_block=4, layer_bytes=0,
    )  # fmt: skip
    empty, positions = torch.zeros(len(lengths), 0, dtype=torch.int32), torch.zeros(total, dtype=torch.int64)
    batch = AttentionBatch(
        num_rows=len(lengths), num_tokens=total, num_decodes=0, query_start_loc=torch.from_numpy(bounds),
        query_start_loc_host=bounds, seq_lens=torch.tensor(lengths), seq_lens_bound=np.array(lengths),
        block_table=empty, slot_mapping=positions, kv_index=positions,
    )  # fmt: skip
    body = TorchAttentionBody(WorkerContext(start=None, dtype=dtype))  # type: ignore[arg-type]
    out = torch.full((total, heads * group, SIZE), torch.nan, dtype=dtype)
    lse = torch.full((total, heads * group), torch.nan)
    sinks, slopes = torch.linspace(-1, 2, heads * group), torch.linspace(0.1, 0.3, heads * group)
    layer = AttentionLayer(
        index=0, group=kv_group, need=need, scale=0.4, sinks=sinks if features else None,
        alibi_slopes=slopes if features else None,
    )  # fmt: skip
    given = (sinks.double().numpy(), slopes.double().numpy())
    if not features:
        given = (np.full_like(given[0], -np.inf), np.zeros_like(given[1]))
    body.forward(layer, q, k, v, LayerCache(k[:0], v[:0]), body.plan(batch, kv_group), out, lse)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for start, stop in pairwise(bounds.tolist()):
        row = [x[start:stop].double().numpy() for x in (q, k, v)]
        expected, expected_lse = dense(*row, 0.4, cap, *given)
        np.testing.assert_allclose(out[start:stop].double().numpy(), expected, atol=tolerance)
        np.testing.assert_allclose(lse[start:stop].numpy(), expected_lse, atol=1e-5)
    assert out.isfinite().all() and lse.isfinite().all()
