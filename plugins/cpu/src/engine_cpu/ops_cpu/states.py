"""Operations of layers that keep states, as engine-states defines them, and what multiplies by a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_cpu._native import StateKernels, StatePlaces, state_places
from engine_cpu.dtypes import DTYPES

if TYPE_CHECKING:
    from engine.interfaces.communicator import Group
    from engine.interfaces.model import StateBatch, StateSite

_SIGMOID, _SILU, _GELU, _GELU_TANH = range(4)
"""What a gate is, by the numbers of native/states.h."""


class States:
    """See `engine_states.ops_states.body`. States are read and written where they lie in the pool; those behind drafts
    lie in a tensor of their own, which the site keeps."""

    _states: StateKernels
    _sorted: tuple[StateBatch, torch.Tensor, torch.Tensor] | None = None

    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, site: StateSite, name: str
    ) -> torch.Tensor:
        """x [T, C], weight [K, C] -> [T, C]."""
        x = _rows(x)
        out = x.new_empty(x.shape)
        places, kept = self._places(site, name)
        self._states.causal_conv(
            DTYPES[x.dtype], x.data_ptr(), x.stride(0), x.shape[1], weight.shape[0], weight.data_ptr(),
            weight.stride(0), 0 if bias is None else bias.data_ptr(), out.data_ptr(), places,
        )  # fmt: skip
        return _saved(out, site, name, kept)

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
        """x [T, H, P] -> [T, H, P]."""
        (x, b, c), dt = (_tokens(part) for part in (x, b, c)), _rows(dt)
        out = x.new_empty(x.shape)
        places, kept = self._places(site, name)
        self._states.ssd(
            DTYPES[x.dtype], x.data_ptr(), x.stride(0), *x.shape[1:], dt.data_ptr(), dt.stride(0), b.data_ptr(),
            b.stride(0), c.data_ptr(), c.stride(0), *b.shape[1:], a.data_ptr(), d.data_ptr(), dt_bias.data_ptr(),
            *dt_limit, out.data_ptr(), places,
        )  # fmt: skip
        return _saved(out, site, name, kept)

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
        """x [T, C] -> [T, C]."""
        x, dt, b, c, gate = (_rows(part) for part in (x, dt, b, c, gate))
        out = x.new_empty(x.shape)
        places, kept = self._places(site, name)
        self._states.selective_scan(
            DTYPES[x.dtype], x.data_ptr(), x.stride(0), x.shape[1], dt.data_ptr(), dt.stride(0), gate.data_ptr(),
            gate.stride(0), b.data_ptr(), b.stride(0), c.data_ptr(), c.stride(0), b.shape[1], a.data_ptr(),
            d.data_ptr(), out.data_ptr(), places,
        )  # fmt: skip
        return _saved(out, site, name, kept)

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
        """q and k [T, G, K], v [T, H, V] -> [T, H, V]."""
        (q, k, v), dt, beta = (_tokens(part) for part in (q, k, v)), _rows(dt), _rows(beta)
        out = v.new_empty(v.shape)
        places, kept = self._places(site, name)
        self._states.gated_delta(
            DTYPES[v.dtype], q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), *k.shape[1:], v.data_ptr(),
            v.stride(0), *v.shape[1:], dt.data_ptr(), dt.stride(0), beta.data_ptr(), beta.stride(0), a.data_ptr(),
            dt_bias.data_ptr(), out.data_ptr(), places,
        )  # fmt: skip
        return _saved(out, site, name, kept)

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
        """x and gate [T, C], weight [C] -> [T, C]."""
        x, gate = _rows(x), _rows(gate)
        out, (rows, channels) = x.new_empty(x.shape), x.shape
        squares = None if ranks is None else torch.empty(rows, 1)
        for given in (False,) if squares is None else (False, True):
            if squares is not None and ranks is not None and given:
                squares = ranks.all_reduce(squares)
            self._states.gated_norm(
                DTYPES[x.dtype], x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), rows, channels, size,
                weight.data_ptr(), eps, gate_last, given, 0 if squares is None else squares.data_ptr(),
                out.data_ptr(),
            )  # fmt: skip
        return out

    def gate_by(self, x: torch.Tensor, gate: torch.Tensor, silu: bool) -> torch.Tensor:
        """x * sigmoid(gate), x and gate [T, C]; with `silu` x * silu(gate)."""
        return self._gated(_SILU if silu else _SIGMOID, _rows(x), _rows(gate))

    def gelu_mul(self, gate_up: torch.Tensor, tanh: bool) -> torch.Tensor:
        """gate_up [T, 2 * I] -> gelu(gate, tanh) * up, [T, I]."""
        gate, up = _rows(gate_up).chunk(2, dim=-1)
        return self._gated(_GELU_TANH if tanh else _GELU, up, gate)

    def _gated(self, what: int, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out, (rows, width) = x.new_empty(x.shape), x.shape
        self._states.gate_by(
            DTYPES[x.dtype], what, x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), rows, width,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts [T, ...] side by side: [T, elements of a token]."""
        out = parts[0].new_empty((len(parts[0]), sum(part[0].numel() for part in parts)))
        start = 0
        for part in parts:
            width = part[0].numel()
            self._copy(part, out[:, start : start + width])
            start += width
        return out

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it is dense; else a copy."""
        if x.is_contiguous():
            return x
        out = x.new_empty(x.shape)
        self._copy(x, out.flatten(1))
        return out

    def _copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, ...] to out [T, elements of a token], whose rows are dense."""
        size = x.itemsize
        if x.dim() == 2:
            x = x.unsqueeze(1)
        if x.dim() != 3 or x.stride(-1) != 1:
            x = x.contiguous().flatten(1).unsqueeze(1)
        rows, parts, width = x.shape
        self._states.copy(
            x.data_ptr(), x.stride(0) * size, x.stride(1) * size, rows, parts, width * size, out.data_ptr(),
            out.stride(0) * size,
        )  # fmt: skip

    def _places(self, site: StateSite, name: str) -> tuple[StatePlaces, torch.Tensor | None]:
        """Where the kernels find and leave a state; and the tensor where they leave those that the site is to keep."""
        pool, batch = site.pool[name], site.batch
        first = pool.data_ptr(), pool.stride(0), batch.read.data_ptr(), len(batch.read)
        if batch.decodes:
            return state_places(*first, 0, *first[:2], 0, batch.write.data_ptr(), len(batch.write)), None
        at, to, kept = batch.write_at, batch.write, None
        place = first[:2]
        if len(at) > len(to):
            at, to = self._in_order(batch)
            kept = pool.new_empty((len(at), *pool.shape[1:]))
            place = kept.data_ptr(), kept.stride(0)
        loc = batch.query_start_loc.data_ptr()
        return state_places(*first, loc, *place, at.data_ptr(), to.data_ptr(), len(at)), kept

    def _in_order(self, batch: StateBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a step with drafts, for all layers: the tokens after which states are kept, rising, and their places."""
        if self._sorted is None or self._sorted[0] is not batch:
            order = np.argsort(batch.write_at_host, kind="stable")
            self._sorted = batch, torch.from_numpy(batch.write_at_host[order]), torch.from_numpy(order)
        return self._sorted[1:]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Dense in its last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[T, a, b], each token dense."""
    return x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _saved(out: torch.Tensor, site: StateSite, name: str, kept: torch.Tensor | None) -> torch.Tensor:
    if kept is not None:
        site.save(name, kept)
    return out
