"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024: "Gated Delta Networks"), in chunks.

A head's state [K, V] maps keys to values. A token lets it fade, and moves what its key gives towards its value, by what
is wrong in it. Within a chunk each correction depends on those before it: a triangular system, which is solved for all
chunks at once. Then the states go from chunk to chunk, in all rows together.
"""

from __future__ import annotations

import torch

from engine_states.ops_states.chunks import Chunks


def one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fade: torch.Tensor, beta: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row: q, k [R, H, K], v [R, H, V], fade and beta [R, H] -> (out [R, H, V], the states after it)."""
    faded = before * fade.exp()[..., None, None]
    change = beta[..., None] * (v - (k[..., None, :] @ faded).squeeze(-2))
    state = faded + k[..., None] * change[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2), state


def in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fade: torch.Tensor,
    beta: torch.Tensor,
    before: torch.Tensor,
    chunks: Chunks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows of any length: T for R in q, k, v, fade and beta -> (out [T, H, V], the states after
    `chunks.kept`). Tokens that pad a chunk have no key: they change nothing."""
    q, k, v, beta, fade = (chunks.split(x).transpose(1, 2) for x in (q, k, v, beta, fade))  # [c, H, L, ...]
    fades = fade.cumsum(-1)
    since = fades.exp()[..., None]  # what is left of the state before the chunk
    future = torch.ones(chunks.length, chunks.length, dtype=torch.bool, device=q.device).triu(1)
    between = (fades[..., :, None] - fades[..., None, :]).masked_fill_(future, float("-inf")).exp_()
    system = beta[..., None] * (k @ k.mT) * between  # its diagonal is read as ones
    wanted = torch.linalg.solve_triangular(system, beta[..., None] * v, upper=False, unitriangular=True)
    reads = torch.linalg.solve_triangular(system, beta[..., None] * since * k, upper=False, unitriangular=True)
    scores, q = (q @ k.mT) * between, q * since
    writes = (k * (fades[..., -1:] - fades).exp()[..., None]).mT
    left = since[..., -1:, :]
    out, states = torch.empty_like(v), before.clone()
    after = before.new_empty(len(v), *before.shape[1:])
    for rows, now in chunks.turns:
        state = states.index_select(0, rows)
        change = wanted[now] - reads[now] @ state
        out.index_copy_(0, now, q[now] @ state + scores[now] @ change)
        state = state * left[now] + writes[now] @ change
        after.index_copy_(0, now, state)
        states.index_copy_(0, rows, state)
    return chunks.join(out.transpose(1, 2)), after.index_select(0, chunks.kept)
