"""The operations of layers that keep states, on plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.interfaces.model import StateBatch, StateSite
from engine_states.ops_states import gated_delta
from engine_states.ops_states.chunks import Chunks

if TYPE_CHECKING:
    from engine.interfaces.communicator import Group
    from engine.interfaces.context import WorkerContext

_SSD_CHUNK = 64
"""Tokens whose products with one another are computed."""
_DELTA_CHUNK = 64
"""Tokens whose corrections depend on one another."""
_UNIT_EPS = 1e-6
"""Added to the squares of a query's or key's elements, as transformers does it."""
_SCAN_CHUNK = 32
"""Tokens computed one after another: as many turns as follow one another in a long prompt."""


class StateOpsBody:
    """On whatever device the inputs lie. Scans are computed in float32 at least.

    Where one takes a `StateSite` and the name of a state there, its rows go on from that state, and it is kept after
    the tokens that the site's batch names: by `load` and `save` here, while others read and write the site's pool in
    place. T tokens; tensors may be strided, but for their last dimension.
    """

    def __init__(self, context: WorkerContext) -> None:
        del context
        self._chunked: dict[int, tuple[StateBatch, Chunks]] = {}

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts [T, ...] side by side, each in the order of its elements: [T, elements of a token], dense."""
        return torch.cat([part.flatten(1) for part in parts], dim=-1)

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        site: StateSite,
        name: str,
    ) -> torch.Tensor:
        """y[t] = silu(bias + sum over k < K of weight[k] * x[t - K + 1 + k]), each channel for itself.

        x [T, C], weight [K, C], dense, bias [C]; the state, in x's dtype, is the last K - 1 inputs, [K - 1, C].

        Returns y [T, C], dense.
        """
        width, before, batch = len(weight), site.load(name), site.batch
        if batch.decodes:
            window = torch.cat([before.to(x.dtype), x.unsqueeze(1)], dim=1)
            y = (window * weight).sum(1)
            after = window[:, 1:].index_select(0, batch.write_at)
        else:
            num_tokens, num_rows, past = len(x), len(before), width - 1
            loc, places = batch.query_start_loc.long(), torch.arange(num_tokens, device=x.device)
            rows = torch.arange(num_rows, device=x.device)
            first = places + past * torch.repeat_interleave(rows, loc[1:] - loc[:-1], output_size=num_tokens)
            inputs = x.new_empty(num_tokens + num_rows * past, x.shape[1])
            inputs.index_copy_(0, first + past, x)
            past_at = ((loc[:-1] + rows * past)[:, None] + torch.arange(past, device=x.device)).view(-1)
            inputs.index_copy_(0, past_at, before.to(x.dtype).reshape(-1, x.shape[1]))
            y = inputs.index_select(0, first) * weight[0]
            for k in range(1, width):
                y += inputs.index_select(0, first + k) * weight[k]
            last = first.index_select(0, batch.write_at)[:, None] + torch.arange(1, width, device=x.device)
            after = inputs[last]
        site.save(name, after)
        return F.silu(y if bias is None else y + bias)

    def ssd(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_limit: tuple[float, float],
        site: StateSite,
        name: str,
    ) -> torch.Tensor:
        """Mamba-2's scan (Dao, Gu 2024: "Transformers are SSMs"), in its chunked form.

        With dt' = clamp(softplus(dt + dt_bias), dt_limit), for each head:
            state[t] = exp(dt'[t] * a) * state[t - 1] + dt'[t] * outer(b[t], x[t])
            y[t] = c[t] @ state[t] + d * x[t]

        x [T, H, P]; dt [T, H]; a, which is negative, d and dt_bias [H]; b and c [T, G, N], of which H / G heads that
        follow one another share each; the state is [H, N, P]. a, d, dt_bias and the state are in float32 at least.

        Returns y [T, H, P] in x's dtype, dense.
        """
        wide, before, batch = torch.promote_types(x.dtype, torch.float32), site.load(name), site.batch
        given, heads = x, x.shape[1]
        x, b, c, before = x.to(wide), b.to(wide), c.to(wide), before.to(wide)
        dt = F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*dt_limit)
        repeats = heads // b.shape[1]
        if batch.decodes:
            b, c = b.repeat_interleave(repeats, 1), c.repeat_interleave(repeats, 1)
            state = before * torch.exp(dt * a)[..., None, None] + b[..., None] * (dt[..., None] * x)[:, :, None, :]
            site.save(name, state.index_select(0, batch.write_at))
            return ((c[..., None, :] @ state)[..., 0, :] + x * d[:, None]).to(given.dtype)
        chunks = self._chunks(batch, _SSD_CHUNK)
        length = chunks.length
        steps = chunks.split(dt).transpose(1, 2)  # [c, H, L]
        sums = torch.cumsum(steps * a[:, None], dim=-1)
        xs = chunks.split(x).transpose(1, 2) * steps[..., None]  # [c, H, L, P]
        bs, cs = (chunks.split(each).transpose(1, 2) for each in (b, c))  # [c, G, L, N]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        decay = (sums[..., :, None] - sums[..., None, :]).masked_fill_(future, float("-inf")).exp_()
        scores = (cs @ bs.transpose(-1, -2)).repeat_interleave(repeats, 1) * decay
        bs, cs = bs.repeat_interleave(repeats, 1), cs.repeat_interleave(repeats, 1)
        to_end = torch.exp(sums[..., -1:] - sums)
        added = bs.transpose(-1, -2) @ (xs * to_end[..., None])  # [c, H, N, P]
        starts, ends = chunks.scan(before, torch.exp(sums[..., -1])[..., None, None], added)
        ys = scores @ xs + (cs * torch.exp(sums)[..., None]) @ starts
        site.save(name, ends.index_select(0, chunks.kept))
        return (chunks.join(ys.transpose(1, 2)) + x * d[:, None]).to(given.dtype)

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        gate: torch.Tensor,
        site: StateSite,
        name: str,
    ) -> torch.Tensor:
        """Mamba's scan (Gu, Dao 2023). With dt' = softplus(dt), for each channel:
            state[t] = exp(dt'[t] * a) * state[t - 1] + dt'[t] * x[t] * b[t]
            y[t] = (c[t] @ state[t] + d * x[t]) * silu(gate[t])

        x, dt and gate [T, C]; a, which is negative, [N, C], dense; b and c [T, N]; d [C]; the state is [N, C]. a, d and
        the state are in float32 at least.

        Returns y [T, C] in x's dtype, dense.
        """
        wide, before, batch = torch.promote_types(x.dtype, torch.float32), site.load(name), site.batch
        given = x
        x, b, c, before = x.to(wide), b.to(wide), c.to(wide), before.to(wide)
        dt = F.softplus(dt.to(wide))
        if batch.decodes:
            state = before * torch.exp(dt[:, None] * a) + b[..., None] * (dt * x)[:, None]
            y, after = (c[:, None] @ state)[:, 0], state.index_select(0, batch.write_at)
        else:
            chunks = self._chunks(batch, _SCAN_CHUNK)
            steps, xs, bs, cs = (chunks.split(each) for each in (dt, dt * x, b, c))
            sums = torch.cumsum(steps, dim=1)
            state = x.new_zeros(len(steps), *a.shape)
            ys = torch.empty_like(xs)
            for t in range(chunks.length):  # of all chunks at once, as if each began with nothing
                state = state * torch.exp(steps[:, t, None] * a) + bs[:, t, :, None] * xs[:, t, None]
                ys[:, t] = (cs[:, t, None] @ state)[:, 0]
            starts, ends = chunks.scan(before, torch.exp(sums[:, -1, None] * a), state)
            for t in range(chunks.length):
                ys[:, t] += (cs[:, t, None] @ (starts * torch.exp(sums[:, t, None] * a)))[:, 0]
            y, after = chunks.join(ys), ends.index_select(0, chunks.kept)
        site.save(name, after)
        return ((y + x * d) * F.silu(gate.to(wide))).to(given.dtype)

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        dt_bias: torch.Tensor,
        beta: torch.Tensor,
        site: StateSite,
        name: str,
    ) -> torch.Tensor:
        """The gated delta rule (Yang, Kautz, Hatamizadeh 2024: "Gated Delta Networks"), with dt' = softplus(dt +
        dt_bias), beta' = sigmoid(beta), and q' and k' of length 1. For each head:
            faded = exp(dt'[t] * a) * state[t - 1]
            state[t] = faded + outer(k'[t], beta'[t] * (v[t] - k'[t] @ faded))
            y[t] = q'[t] / sqrt(K) @ state[t]

        q and k [T, G, K], of which H / G heads that follow one another share each; v [T, H, V]; dt and beta [T, H]; a,
        which is negative, and dt_bias [H]; the state is [H, K, V]. a, dt_bias and the state are in float32 at least.

        Returns y [T, H, V] in v's dtype, dense.
        """
        wide, before, batch = torch.promote_types(v.dtype, torch.float32), site.load(name), site.batch
        given, repeats = v, v.shape[1] // k.shape[1]
        q, k, v, before = q.to(wide), k.to(wide), v.to(wide), before.to(wide)
        q, k = (x * (x.square().sum(-1, keepdim=True) + _UNIT_EPS).rsqrt() for x in (q, k))
        q, k = (q * q.shape[-1] ** -0.5).repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
        fade = F.softplus(dt.to(wide) + dt_bias.to(wide)) * a.to(wide)
        beta = beta.to(wide).sigmoid()
        if batch.decodes:
            y, state = gated_delta.one_token(q, k, v, fade, beta, before)
            after = state.index_select(0, batch.write_at)
        else:
            y, after = gated_delta.in_chunks(q, k, v, fade, beta, before, self._chunks(batch, _DELTA_CHUNK))
        site.save(name, after)
        return y.to(given.dtype)

    def gate_by(self, x: torch.Tensor, gate: torch.Tensor, silu: bool) -> torch.Tensor:
        """x * sigmoid(gate), x and gate [T, C]; with `silu` x * silu(gate). The gate in float32 at least."""
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return (x * (F.silu(wide) if silu else wide.sigmoid())).to(x.dtype)

    def gated_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        size: int,
        ranks: Group | None = None,
        gate_last: bool = False,
    ) -> torch.Tensor:
        """x * silu(gate), of which each `size` elements are divided by the root of their squares' mean, times weight.

        x and gate [T, C], weight [C]. ranks: over which each `size` elements are divided; None: this rank has them all.
        gate_last: x alone is normed, and then multiplied by silu(gate).
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        gates = F.silu(gate.to(wide))
        gated = x.to(wide) if gate_last else x.to(wide) * gates
        groups = gated.unflatten(-1, (-1, size if ranks is None else gated.shape[-1]))
        squares = groups.square().sum(-1, keepdim=True)
        if ranks is not None:
            squares = ranks.all_reduce(squares)
        normed = (groups * torch.rsqrt(squares / size + eps)).flatten(-2)
        return (normed * weight * gates).to(x.dtype) if gate_last else normed.to(x.dtype) * weight

    def _chunks(self, batch: StateBatch, size: int) -> Chunks:
        """Of a step: cut once, for all layers."""
        found = self._chunked.get(size)
        if found is None or found[0] is not batch:
            self._chunked[size] = found = batch, Chunks(batch, size)
        return found[1]
