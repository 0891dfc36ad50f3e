"""Routing and grouping by expert, beside loops over tokens in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine_kit.by_expert import by_expert
from engine_kit.routing import ExpertAct, RouteForm
from engine_moe.ops_moe.body import MoeOpsBody

OPS = MoeOpsBody(None)  # type: ignore[arg-type]
EXPERTS, HIDDEN = 12, 8
FORMS = {
    "softmax": RouteForm(3),
    "renormalised": RouteForm(3, renormalise=True),
    "scaled": RouteForm(2, scale=2.5),
    "one": RouteForm(1),
    "all": RouteForm(EXPERTS, renormalise=True),
    "groups": RouteForm(3, groups=4, top_groups=2),
    "sigmoid": RouteForm(3, sigmoid=True),
    "deepseek-v3": RouteForm(4, sigmoid=True, renormalise=True, scale=2.5, groups=4, top_groups=2, pairs=True),
}


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_token(x: list[float], weight: list[list[float]], bias: list[float], form: RouteForm) -> dict[int, float]:
    """Expert -> weight, by the definition."""
    logits = [sum(a * b for a, b in zip(x, row, strict=True)) for row in weight]
    if form.sigmoid:
        scores = [1 / (1 + math.exp(-one)) for one in logits]
    else:
        scores = [math.exp(one) / sum(math.exp(other) for other in logits) for one in logits]
    choice = [score + more for score, more in zip(scores, bias, strict=True)]
    size = len(weight) // form.groups
    groups = [range(first, first + size) for first in range(0, len(weight), size)]

    def best(group: range) -> float:
        return sum(sorted((choice[expert] for expert in group), reverse=True)[: 2 if form.pairs else 1])

    is_open = [expert for group in sorted(groups, key=best, reverse=True)[: form.top_groups] for expert in group]
    chosen = sorted(is_open, key=lambda expert: choice[expert], reverse=True)[: form.top_k]
    total = sum(scores[expert] for expert in chosen) if form.renormalise else 1.0
    return {expert: scores[expert] / total * form.scale for expert in chosen}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_routes(form: RouteForm, biased: bool) -> None:
    x, weight = tensor(40, HIDDEN), tensor(EXPERTS, HIDDEN, seed=1)
    bias = tensor(EXPERTS, seed=2) if biased else torch.zeros(EXPERTS, dtype=torch.float64)
    ids, weights = OPS.route(OPS.router_logits(x, weight), bias if biased else None, form)
    assert ids.dtype == torch.int32
    assert ids.shape == weights.shape == (40, form.top_k)
    for token in range(40):
        expected = one_token(x[token].tolist(), weight.tolist(), bias.tolist(), form)
        found = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert found == pytest.approx(expected)


def test_biased_logits() -> None:
    x, weight, bias = tensor(40, HIDDEN), tensor(EXPERTS, HIDDEN, seed=1), tensor(EXPERTS, seed=2)
    ids, weights = OPS.route(x @ weight.T, bias, RouteForm(3, renormalise=True, biased_logits=True))
    best = (x @ weight.T + bias).topk(3)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(weights, best.values.softmax(-1))


def test_chosen_one_by_one() -> None:
    """SparseMixer, written out for each token."""
    x, weight = tensor(40, HIDDEN), tensor(EXPERTS, HIDDEN, seed=1)
    ids, weights = OPS.route(x @ weight.T, None, RouteForm(2, jitter=0.2))
    for token, logits in enumerate((x @ weight.T).tolist()):
        left = dict(enumerate(logits))
        for place in range(2):
            chosen, best = max(left.items(), key=lambda pair: pair[1])
            near = [one for one in left.values() if (best - one) / max(abs(one), best) <= 0.4]
            assert ids[token, place] == chosen
            assert weights[token, place].item() == pytest.approx(1 / sum(math.exp(one - best) for one in near))
            del left[chosen]


def test_no_expert_scores_at_all() -> None:
    """Sigmoids may all be 0: the weights are numbers then, too."""
    form = RouteForm(2, sigmoid=True, renormalise=True)
    _, weights = OPS.route(torch.full((1, 4), -1e4), None, form)
    assert weights.isfinite().all()


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("per_token", [1, 3, EXPERTS])
def test_each_expert_gets_its_tokens(tokens: int, per_token: int) -> None:
    x, matrices = tensor(tokens, HIDDEN), tensor(EXPERTS, HIDDEN, HIDDEN, seed=1)
    ids = tensor(tokens, EXPERTS, seed=2).topk(per_token).indices
    weights = tensor(tokens, per_token, seed=3)
    calls = dict.fromkeys(range(EXPERTS), 0)

    def expert(index: int, rows: torch.Tensor) -> torch.Tensor:
        calls[index] += 1
        assert len(rows)
        return rows @ matrices[index]

    found = by_expert(x, ids, weights, EXPERTS, expert)
    for token in range(tokens):
        parts = zip(ids[token].tolist(), weights[token], strict=True)
        torch.testing.assert_close(found[token], sum(weight * (x[token] @ matrices[one]) for one, weight in parts))
    assert {index for index, count in calls.items() if count} == set(ids.flatten().tolist())
    assert set(calls.values()) <= {0, 1}, "an expert is called once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_beside_others(dtype: torch.dtype) -> None:
    """Its bits are those that it has alone, where an expert's rows are each for itself."""
    x = tensor(9, HIDDEN).to(dtype)
    ids, weights = tensor(9, EXPERTS, seed=2).topk(4).indices, tensor(9, 4, seed=3).float()

    def expert(index: int, rows: torch.Tensor) -> torch.Tensor:
        return rows * (index - 5.5)

    together = by_expert(x, ids, weights, EXPERTS, expert)
    assert together.dtype == dtype
    for token in range(9):
        some = slice(token, token + 1)
        assert torch.equal(by_expert(x[some], ids[some], weights[some], EXPERTS, expert), together[some])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [ExpertAct(), ExpertAct("relu2", gated=False), ExpertAct("clamped", True, 1.7, 1.5)])
def test_experts(act: ExpertAct, bias: bool) -> None:
    """Each token alone, expert by expert."""
    inner, x = 6, tensor(7, HIDDEN)
    first, last = tensor(EXPERTS, inner * (1 + act.gated), HIDDEN, seed=1), tensor(EXPERTS, HIDDEN, inner, seed=2)
    biases = (tensor(*first.shape[:2], seed=3), tensor(EXPERTS, HIDDEN, seed=4)) if bias else (None, None)
    ids, weights = tensor(7, EXPERTS, seed=5).topk(3).indices.int(), tensor(7, 3, seed=6)
    found = OPS.experts(x, OPS.pack_experts(first, last, *biases), ids, weights, act)
    for token in range(7):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, one in zip(weights[token], ids[token].tolist(), strict=True):
            middle = OPS.gated_act((first[one] @ x[token] + (0 if biases[0] is None else biases[0][one]))[None], act)[0]
            expected += weight * (last[one] @ middle + (0 if biases[1] is None else biases[1][one]))
        torch.testing.assert_close(found[token], expected)


def test_no_token() -> None:
    packed = OPS.pack_experts(torch.ones(4, 6, 8), torch.ones(4, 8, 3), None, None)
    none = torch.empty(0, 8), packed, torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), ExpertAct()
    assert OPS.experts(*none).shape == (0, 8)


def test_gates() -> None:
    x, gate = tensor(5, HIDDEN), tensor(5, 1, seed=1)
    torch.testing.assert_close(OPS.moe_gate(x, gate), x / (1 + (-gate).exp()))
    assert OPS.moe_gate(x.bfloat16(), gate.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
        ("gelu_tanh", lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
        ("relu", lambda x: max(x, 0.0)),
        ("relu2", lambda x: max(x, 0.0) ** 2),
    ],
)
def test_acts(kind: Any, of: Any) -> None:
    x = tensor(6, 8) * 2
    for row, gated, plain in zip(
        x.tolist(), OPS.gated_act(x, ExpertAct(kind)), OPS.gated_act(x, ExpertAct(kind, gated=False)), strict=True
    ):
        assert gated.tolist() == pytest.approx([of(gate) * up for gate, up in zip(row[:4], row[4:], strict=True)])
        assert plain.tolist() == pytest.approx([of(one) for one in row])
    assert OPS.gated_act(x.bfloat16(), ExpertAct(kind)).dtype == torch.bfloat16


def test_clamped_gates() -> None:
    gate_up, act = tensor(6, 8) * 2, ExpertAct("clamped", alpha=1.7, limit=1.5)
    for row, found in zip(gate_up.tolist(), OPS.gated_act(gate_up, act).tolist(), strict=True):
        pairs = [(min(gate, 1.5), min(max(up, -1.5), 1.5)) for gate, up in zip(row[:4], row[4:], strict=True)]
        assert found == pytest.approx([(up + 1) * gate / (1 + math.exp(-1.7 * gate)) for gate, up in pairs])
    assert OPS.gated_act(gate_up.bfloat16(), act).dtype == torch.bfloat16
