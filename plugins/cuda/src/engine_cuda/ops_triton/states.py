"""Convolutions and scans of layers that keep states, as engine-states defines them.

A scan's program has some columns of one row's state in registers, from the row's first token to its last: columns do
not depend on one another. It reads them from the page of the pool where the row goes on, and leaves them in pages, and
after drafts in a tensor beside the pool, without anything between. A convolution's outputs do not depend on one
another, and are computed side by side; only in a step of decodes its states, too, are written in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from engine_cuda.ops_triton.launching import power_of_2

if TYPE_CHECKING:
    from engine.interfaces.model import StateSite

COLUMNS = 32
"""Of a state, to a program."""
CHANNELS = 256
"""Of a convolution, to a program."""
SEARCH: tl.constexpr = tl.constexpr(64)
"""Bounds that are looked at together."""
UNIT_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def count_below(bounds, count, value):
    """How many of bounds [count], rising, are below a value."""
    found = 0
    for start in range(0, count, SEARCH):
        offs = start + tl.arange(0, SEARCH)
        bound = tl.load(bounds + offs, mask=offs < count, other=0)
        found += tl.sum(((offs < count) & (bound < value)).to(tl.int32))
    return found


@triton.jit
def softplus(x):
    """log(1 + e^x): log1p(u) = 2 atanh(u / (2 + u)), by its series, which is exact for small u, too."""
    u = tl.exp(-tl.abs(x))
    z = u / (2.0 + u)
    square = z * z
    p = square * (1.0 / 17) + 1.0 / 15
    p = p * square + 1.0 / 13
    p = p * square + 1.0 / 11
    p = p * square + 1.0 / 9
    p = p * square + 1.0 / 7
    p = p * square + 1.0 / 5
    p = p * square + 1.0 / 3
    p = p * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * z * p


@triton.jit
def begin_row(places, strides, counts, row, offs, mask, DECODES: tl.constexpr):
    """A row's first token and the one behind its last, its state, and where its marks begin in both lists.

    places: (pool, read, loc, write, kept, at): see `_places`. strides: of pages and of kept states. counts: of marks
    that go to pages, and of those that are kept beside the pool.
    """
    page = tl.load(places[1] + row)
    state = tl.load(places[0] + page * strides[0] + offs, mask=mask & (page >= 0), other=0.0)
    if DECODES:
        begin = row
        end = row + 1
        mark = row.to(tl.int32)
        draft = 0
    else:
        begin = tl.load(places[2] + row).to(tl.int64)
        end = tl.load(places[2] + row + 1).to(tl.int64)
        mark = count_below(places[5], counts[0], begin)
        draft = count_below(places[5] + counts[0], counts[1], begin)
    return begin, end, state.to(tl.float32), mark, draft


@triton.jit
def leave(places, strides, counts, token, state, offs, mask, mark, draft, DECODES: tl.constexpr):
    """Write the state after a token where it is to be left; the marks that come next."""
    if DECODES:
        page = tl.load(places[3] + token)
        tl.store(places[0] + page * strides[0] + offs, state, mask=mask)
    else:
        here = tl.load(places[5] + mark, mask=mark < counts[0], other=-1) == token
        page = tl.load(places[3] + mark, mask=here, other=0)
        tl.store(places[0] + page * strides[0] + offs, state, mask=mask & here)
        mark += here.to(tl.int32)
        here = tl.load(places[5] + counts[0] + draft, mask=draft < counts[1], other=-1) == token
        place = (counts[0] + draft).to(tl.int64)
        tl.store(places[4] + place * strides[1] + offs, state, mask=mask & here)
        draft += here.to(tl.int32)
    return mark, draft


@triton.jit(do_not_specialize=["counts"])
def ssd_kernel(
    x, dt, b, c, numbers, out, places, strides, counts, token_strides, heads, per_group, dt_low, dt_high,
    SIZE: tl.constexpr, STATE: tl.constexpr, DECODES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Mamba-2's scan. Grid: (heads, rows, blocks of columns). numbers: (a, d, dt_bias). token_strides: of x, dt, b and
    c. The state is [heads, STATE, SIZE]."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_n = offs_n < STATE
    mask_p = offs_p < SIZE
    mask = mask_n[:, None] & mask_p[None]
    offs = (head * STATE + offs_n[:, None]) * SIZE + offs_p[None]
    offs_bc = head // per_group * STATE + offs_n
    a, d, dt_bias = numbers
    rate = tl.load(a + head)
    direct = tl.load(d + head)
    bias = tl.load(dt_bias + head)
    begin, end, state, mark, draft = begin_row(places, strides, counts, row, offs, mask, DECODES)
    for token in range(begin, end):
        step = softplus(tl.load(dt + token * token_strides[1] + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, dt_low), dt_high)
        wide = tl.load(x + token * token_strides[0] + head * SIZE + offs_p, mask=mask_p, other=0.0).to(tl.float32)
        ins = tl.load(b + token * token_strides[2] + offs_bc, mask=mask_n, other=0.0).to(tl.float32)
        outs = tl.load(c + token * token_strides[3] + offs_bc, mask=mask_n, other=0.0).to(tl.float32)
        state = state * tl.exp(step * rate) + ins[:, None] * (step * wide)[None]
        y = tl.sum(state * outs[:, None], axis=0) + direct * wide
        tl.store(out + (token * heads + head) * SIZE + offs_p, y.to(out.dtype.element_ty), mask=mask_p)
        mark, draft = leave(places, strides, counts, token, state, offs, mask, mark, draft, DECODES)


@triton.jit(do_not_specialize=["counts"])
def selective_scan_kernel(
    x, dt, b, c, gate, numbers, out, places, strides, counts, token_strides, channels,
    STATE: tl.constexpr, DECODES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mamba's scan. Grid: (blocks of channels, rows). numbers: (a [STATE, channels], d). token_strides: of x, dt, b, c
    and gate. The state is [STATE, channels]."""
    row = tl.program_id(1).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_n = offs_n < STATE
    mask_c = offs_c < channels
    mask = mask_n[:, None] & mask_c[None]
    offs = offs_n[:, None] * channels + offs_c[None]
    rate = tl.load(numbers[0] + offs, mask=mask, other=0.0)
    direct = tl.load(numbers[1] + offs_c, mask=mask_c, other=0.0)
    begin, end, state, mark, draft = begin_row(places, strides, counts, row, offs, mask, DECODES)
    for token in range(begin, end):
        step = softplus(tl.load(dt + token * token_strides[1] + offs_c, mask=mask_c, other=0.0).to(tl.float32))
        wide = tl.load(x + token * token_strides[0] + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        ins = tl.load(b + token * token_strides[2] + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        outs = tl.load(c + token * token_strides[3] + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        by = tl.load(gate + token * token_strides[4] + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        state = state * tl.exp(step[None] * rate) + ins[:, None] * (step * wide)[None]
        y = tl.sum(state * outs[:, None], axis=0) + direct * wide
        y = y * (by / (1.0 + tl.exp(-by)))
        tl.store(out + token * channels + offs_c, y.to(out.dtype.element_ty), mask=mask_c)
        mark, draft = leave(places, strides, counts, token, state, offs, mask, mark, draft, DECODES)


@triton.jit(do_not_specialize=["counts"])
def gated_delta_kernel(
    q, k, v, dt, beta, numbers, out, places, strides, counts, token_strides, heads, per_key, scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, DECODES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gated delta rule. Grid: (heads, rows, blocks of columns). numbers: (a, dt_bias). token_strides: of q, k, v,
    dt and beta. scale: of queries of length 1. The state is [heads, KEY, VALUE]."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = offs_k < KEY
    mask_v = offs_v < VALUE
    mask = mask_k[:, None] & mask_v[None]
    offs = (head * KEY + offs_k[:, None]) * VALUE + offs_v[None]
    of_key = head // per_key * KEY + offs_k
    rate = tl.load(numbers[0] + head)
    bias = tl.load(numbers[1] + head)
    begin, end, state, mark, draft = begin_row(places, strides, counts, row, offs, mask, DECODES)
    for token in range(begin, end):
        query = tl.load(q + token * token_strides[0] + of_key, mask=mask_k, other=0.0).to(tl.float32)
        key = tl.load(k + token * token_strides[1] + of_key, mask=mask_k, other=0.0).to(tl.float32)
        query = query * (scale * tl.rsqrt(tl.sum(query * query) + UNIT_EPS))
        key = key * tl.rsqrt(tl.sum(key * key) + UNIT_EPS)
        value = tl.load(v + token * token_strides[2] + head * VALUE + offs_v, mask=mask_v, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt + token * token_strides[3] + head).to(tl.float32) + bias)
        by = tl.load(beta + token * token_strides[4] + head).to(tl.float32)
        state = state * tl.exp(step * rate)
        wrong = (value - tl.sum(state * key[:, None], axis=0)) / (1.0 + tl.exp(-by))
        state = state + key[:, None] * wrong[None]
        y = tl.sum(state * query[:, None], axis=0)
        tl.store(out + (token * heads + head) * VALUE + offs_v, y.to(out.dtype.element_ty), mask=mask_v)
        mark, draft = leave(places, strides, counts, token, state, offs, mask, mark, draft, DECODES)


@triton.jit
def conv_input(x, pool, page, place, x_stride, pool_stride, begin, channels, offs_c, mask_c, PAST: tl.constexpr):
    """x[place] of a row that begins at token `begin`, or what the row's state has in its place."""
    new = place >= begin
    given = tl.load(x + place * x_stride + offs_c, mask=mask_c & new, other=0.0).to(tl.float32)
    old = pool + page * pool_stride + (place - begin + PAST) * channels + offs_c
    return given + tl.load(old, mask=mask_c & (new == 0) & (page >= 0), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "tokens"])
def causal_conv_kernel(
    x, weight, bias, out, places, after, strides, rows, tokens, channels, weight_stride,
    KERNEL: tl.constexpr, BIAS: tl.constexpr, DECODES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The convolution of a token, or the state after one. Grid: (T, and behind these the states that are kept; blocks
    of channels). places: (pool, read, loc, write, at). after: [marks, KERNEL - 1, channels]; in a step of decodes it is
    not used: a program that computes a token writes its state in place. strides: of x's tokens and of pages."""
    pool, read, loc, write, at = places
    item = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < channels
    token = item
    if DECODES:
        row = item
        begin = item
    else:
        if item >= tokens:
            token = tl.load(at + item - tokens)
        row = (count_below(loc + 1, rows, token + 1)).to(tl.int64)
        begin = tl.load(loc + row).to(tl.int64)
    page = tl.load(read + row)
    if item < tokens:
        total = tl.zeros([BLOCK_C], tl.float32)
        if BIAS:
            total += tl.load(bias + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        for k in tl.static_range(KERNEL):
            place = token - (KERNEL - 1) + k
            wide = conv_input(x, pool, page, place, strides[0], strides[1], begin, channels, offs_c, mask_c, KERNEL - 1)
            total += wide * tl.load(weight + k * weight_stride + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        y = total / (1.0 + tl.exp(-total))
        tl.store(out + token * channels + offs_c, y.to(out.dtype.element_ty), mask=mask_c)
    if DECODES or item >= tokens:
        if DECODES:
            left = pool + tl.load(write + row) * strides[1]
        else:
            left = after + (item - tokens) * (KERNEL - 1) * channels
        for k in tl.static_range(KERNEL - 1):  # each is read before its place is written: they move up by one
            place = token - (KERNEL - 2) + k
            wide = conv_input(x, pool, page, place, strides[0], strides[1], begin, channels, offs_c, mask_c, KERNEL - 1)
            tl.store(left + k * channels + offs_c, wide.to(pool.dtype.element_ty), mask=mask_c)


class Scans:
    """See `engine_states.ops_states.body`."""

    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, site: StateSite, name: str
    ) -> torch.Tensor:
        """x [T, C], weight [K, C] -> [T, C]."""
        x, pool, batch = _rows(x), site.pool[name], site.batch
        tokens, channels = x.shape
        out, decodes, marks = x.new_empty(x.shape), batch.decodes, len(batch.write_at)
        after = x.new_empty(0 if decodes else marks, len(weight) - 1, channels)
        if tokens:
            block = min(CHANNELS, power_of_2(channels))
            causal_conv_kernel[(tokens + len(after), triton.cdiv(channels, block))](
                x, weight, x if bias is None else bias, out,
                (pool, batch.read, batch.query_start_loc, batch.write, batch.write_at), after,
                (x.stride(0), pool.stride(0)), len(batch.read), tokens, channels, weight.stride(0), len(weight),
                bias is not None, decodes, block,
            )  # fmt: skip
        if not decodes:
            site.save(name, after)
        return out

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
        (_, heads, size), (_, groups, state) = x.shape, b.shape
        out, (places, strides, counts, decodes) = x.new_empty(x.shape), _places(site, name)
        rows, block = len(site.batch.read), min(COLUMNS, power_of_2(size))
        ssd_kernel[(heads, rows, triton.cdiv(size, block))](
            x, dt, b, c, (a, d, dt_bias), out, places, strides, counts,
            (x.stride(0), dt.stride(0), b.stride(0), c.stride(0)), heads, heads // groups, *dt_limit, size, state,
            decodes, power_of_2(state), block,
        )  # fmt: skip
        return _saved(out, site, name, places)

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
        channels, state = x.shape[1], b.shape[1]
        out, (places, strides, counts, decodes) = x.new_empty(x.shape), _places(site, name)
        block = min(4 * COLUMNS, power_of_2(channels))
        selective_scan_kernel[(triton.cdiv(channels, block), len(site.batch.read))](
            x, dt, b, c, gate, (a, d), out, places, strides, counts,
            (x.stride(0), dt.stride(0), b.stride(0), c.stride(0), gate.stride(0)), channels, state, decodes,
            power_of_2(state), block,
        )  # fmt: skip
        return _saved(out, site, name, places)

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
        (_, key_heads, key), (_, heads, value) = k.shape, v.shape
        out, (places, strides, counts, decodes) = v.new_empty(v.shape), _places(site, name)
        block = min(COLUMNS, power_of_2(value))
        gated_delta_kernel[(heads, len(site.batch.read), triton.cdiv(value, block))](
            q, k, v, dt, beta, (a, dt_bias), out, places, strides, counts,
            (q.stride(0), k.stride(0), v.stride(0), dt.stride(0), beta.stride(0)), heads, heads // key_heads,
            key**-0.5, key, value, decodes, power_of_2(key), block,
        )  # fmt: skip
        return _saved(out, site, name, places)


def _places(site: StateSite, name: str) -> tuple[tuple[torch.Tensor, ...], tuple[int, int], tuple[int, int], bool]:
    """(pool, read, loc, write, kept, at), the strides of pages and of kept states, how many states go to pages and how
    many are kept beside the pool, and whether the step has decodes alone.

    kept: [m, *shape], of which the first that go to pages are not filled; the pool where there are no drafts.
    """
    pool, batch = site.pool[name], site.batch
    written, kept = len(batch.write), pool
    drafted = 0 if batch.decodes else len(batch.write_at_host) - written
    if drafted:
        kept = pool.new_empty((written + drafted, *pool.shape[1:]))
    places = (pool, batch.read, batch.query_start_loc, batch.write, kept, batch.write_at)
    return places, (pool.stride(0), kept.stride(0)), (written, drafted), batch.decodes


def _saved(out: torch.Tensor, site: StateSite, name: str, places: tuple[torch.Tensor, ...]) -> torch.Tensor:
    pool, write, kept = places[0], places[3], places[4]
    if kept is not pool:  # what the kernel wrote into pages goes the same way once more
        kept[: len(write)] = pool.index_select(0, write)
        site.save(name, kept)
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Dense in its last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tokens(x: torch.Tensor) -> Any:
    """[T, a, b], each token dense."""
    return x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
