"""Who computes which token: a router's logits, and the experts that they choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine_cuda.dependents import MayDepend
from engine_cuda.ops_triton.launching import power_of_2, start_dependent

if TYPE_CHECKING:
    from engine_kit.routing import RouteForm

FEW_ROWS = 32
"""Rows of a router's product by a kernel of its own; more go to torch's product, in float32 too."""
EACH = 2
"""Experts of a program of that kernel."""
WIDTH = 1024
"""Inputs that it takes at a time."""
SMALLEST: tl.constexpr = tl.constexpr(1e-20)
"""Added to a sum that is divided by, as the definition does: sigmoids may all be 0."""
LOWEST: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def router_logits_kernel(
    x, weight, out, x_stride, experts, INPUTS: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [T, experts] = x [T, INPUTS] @ weight [experts, INPUTS].T, of float32 numbers. Grid: (T, blocks of EACH)."""
    start_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offs_e = tl.program_id(1) * EACH + tl.arange(0, EACH)
    offs_n = tl.arange(0, WIDTH)
    total = tl.zeros((EACH, WIDTH), tl.float32)
    for start in range(0, INPUTS, WIDTH):
        mask_n = start + offs_n < INPUTS
        piece = tl.load(x + token * x_stride + start + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        ptrs = weight + offs_e[:, None] * INPUTS + (start + offs_n)[None]
        total += tl.load(ptrs, mask=(offs_e < experts)[:, None] & mask_n[None], other=0.0) * piece[None]
    tl.store(out + token * experts + offs_e, tl.sum(total, 1), mask=offs_e < experts)


@triton.jit
def _take_best(choice, offs):
    """The first place of the largest of `choice` [n], whose places are `offs`, and `choice` without it."""
    place = tl.argmax(choice, 0)
    return place, tl.where(offs == place, LOWEST, choice)


@triton.jit
def _open_groups(choice, GROUPS: tl.constexpr, PADDED: tl.constexpr, TOP_GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """`choice` [PADDED, n], a row for each group, with -inf in the groups that are closed."""
    best = tl.max(choice, 1)
    if PAIRS:
        places = tl.argmax(choice, 1)
        rest = tl.where(tl.arange(0, choice.shape[1])[None] == places[:, None], LOWEST, choice)
        best += tl.max(rest, 1)
    offs_g = tl.arange(0, PADDED)
    left = tl.where((offs_g < GROUPS) & (best == best), best, LOWEST)
    is_open = tl.zeros((PADDED,), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        group, left = _take_best(left, offs_g)
        is_open = tl.where(offs_g == group, 1, is_open)
    return tl.where(is_open[:, None] > 0, choice, LOWEST)


@triton.jit
def route_kernel(
    logits, bias, ids, weights, scale, jitter, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, PAIRS: tl.constexpr, ONE_BY_ONE: tl.constexpr,
    BIASED_LOGITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. A token's scores lie in a matrix with a row for each group, which is one where there are none.

    Of equals the first is chosen. What is no number is chosen last, so that every place that is found is an expert's.
    """
    start_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, PADDED_GROUPS)[:, None], tl.arange(0, PADDED_SIZE)[None]
    mask = (group < GROUPS) & (member < SIZE)
    expert = group * SIZE + member
    given = tl.load(logits + token * EXPERTS + expert, mask=mask, other=LOWEST)
    if bias is not None:
        added = tl.load(bias + expert, mask=mask, other=0.0)
        if BIASED_LOGITS:
            given += added
    if ONE_BY_ONE:
        scores, choice = given, given
    else:
        if SIGMOID:
            scores = tl.where(mask, 1.0 / (1.0 + tl.exp(-given)), 0.0)
        else:
            exponents = tl.where(mask, tl.exp(given - tl.max(tl.max(given, 1), 0)), 0.0)
            scores = exponents / tl.sum(tl.sum(exponents, 1), 0)
        choice = scores
        if bias is not None:  # noqa: SIM102 (Triton decides each before it compiles what is inside)
            if not BIASED_LOGITS:
                choice += added
        choice = tl.where(mask, choice, LOWEST)
        if TOP_GROUPS < GROUPS:
            choice = _open_groups(choice, GROUPS, PADDED_GROUPS, TOP_GROUPS, PAIRS)
    PADDED: tl.constexpr = PADDED_GROUPS * PADDED_SIZE
    choice = tl.reshape(tl.where(choice == choice, choice, LOWEST), (PADDED,))
    scores = tl.reshape(scores, (PADDED,))
    offs, offs_k = tl.arange(0, PADDED), tl.arange(0, PADDED_K)
    found_ids, found = tl.zeros((PADDED_K,), tl.int32), tl.zeros((PADDED_K,), tl.float32)
    for i in tl.static_range(TOP_K):
        left = choice
        place, choice = _take_best(choice, offs)
        weight = tl.sum(tl.where(offs == place, scores, 0.0), 0)
        if ONE_BY_ONE:
            far = (weight - scores) / tl.maximum(tl.abs(scores), weight) > 2 * jitter
            weight = 1.0 / tl.sum(tl.where(far | (left == LOWEST), 0.0, tl.exp(left - weight)), 0)
        found_ids = tl.where(offs_k == i, place // PADDED_SIZE * SIZE + place % PADDED_SIZE, found_ids)
        found = tl.where(offs_k == i, weight, found)
    if not ONE_BY_ONE:
        if RENORMALISE:
            found = found / (tl.sum(found, 0) + SMALLEST)
        found = found * scale
    tl.store(ids + token * TOP_K + offs_k, found_ids, mask=offs_k < TOP_K)
    tl.store(weights + token * TOP_K + offs_k, found, mask=offs_k < TOP_K)


class Routing(MayDepend):
    """The operations `router_logits` and `route`, which engine-moe defines."""

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, H], weight float32 [E, H] -> float32 [T, E]."""
        rows, (experts, inputs) = len(x), weight.shape
        if not 0 < rows <= FEW_ROWS:
            return F.linear(x.to(weight.dtype), weight)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = weight.new_empty(rows, experts)
        width = min(WIDTH, max(16, power_of_2(inputs)))
        router_logits_kernel[(rows, triton.cdiv(experts, EACH))](
            x, weight.contiguous(), out, x.stride(0), experts, inputs, EACH, width, bool(self.dependent),
            **self.dependent,
        )  # fmt: skip
        return out

    def route(
        self, logits: torch.Tensor, bias: torch.Tensor | None, form: RouteForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits float32 [T, E], bias float32 [E] -> ids int32 [T, k], weights float32 [T, k]; of equals the first."""
        logits, (rows, experts) = logits.contiguous(), logits.shape
        ids = torch.empty((rows, form.top_k), dtype=torch.int32, device=logits.device)
        weights = logits.new_empty(rows, form.top_k)
        one_by_one = form.jitter is not None
        groups = 1 if one_by_one or form.top_groups >= form.groups else form.groups
        padded = power_of_2(groups), power_of_2(experts // groups)
        if rows:
            route_kernel[(rows,)](
                logits, bias if bias is None else bias.contiguous(), ids, weights, form.scale, form.jitter or 0.0,
                experts, form.top_k, power_of_2(form.top_k), form.sigmoid, form.renormalise, groups, padded[0],
                padded[1], form.top_groups, form.pairs, one_by_one, form.biased_logits,
                bool(self.dependent), **self.dependent, num_warps=max(1, min(4, padded[0] * padded[1] // 256)),
            )  # fmt: skip
        return ids, weights
