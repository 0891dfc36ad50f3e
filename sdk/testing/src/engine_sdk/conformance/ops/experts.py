"""The operations of mixtures of experts, which engine-moe defines, beside loops over tokens in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.interfaces.ops import OpsCard, OpsNeed
from engine.interfaces.platform import CaptureKey
from engine_kit.routing import ExpertAct, RouteForm
from engine_sdk.conformance.contexts import require_capture, worker_context
from engine_sdk.conformance.ops.subject import DTYPES, OpsSubject, plain

FORMS = {
    "softmax": RouteForm(2),
    "renormalised": RouteForm(3, renormalise=True, scale=1.5),
    "all": RouteForm(12, renormalise=True),
    "biased": RouteForm(3, renormalise=True, biased_logits=True),
    "groups": RouteForm(3, groups=4, top_groups=2),
    "sigmoid": RouteForm(4, sigmoid=True, renormalise=True, scale=2.5, groups=4, top_groups=2, pairs=True),
    "jitter": RouteForm(2, jitter=0.2),
}
ACTS = {
    "silu": ExpertAct(),
    "gelu": ExpertAct("gelu"),
    "gelu_tanh": ExpertAct("gelu_tanh"),
    "relu": ExpertAct("relu"),
    "relu2": ExpertAct("relu2", gated=False),
    "clamped": ExpertAct("clamped", alpha=1.7, limit=1.5),
}
EXPERTS = 12
WIDE = {"float64": "float64"}
"""In which dtype logits and weights are, where it is not float32."""


class ExpertOperations(OpsSubject):
    """Routing, and what experts compute."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", [7, 64, 200])
    def test_router_logits(self, dtype: str, size: int) -> None:
        """In float32 at least, whatever the activations are."""
        operation, wide = self.operation("router_logits", dtype), WIDE.get(dtype, "float32")
        weight = self.tensor(EXPERTS, size, dtype=wide, seed=1)
        for rows in (0, 1, 3, 40):
            x = self.tensor(rows, size, dtype=dtype)
            scale = np.abs(plain(x)) @ np.abs(plain(weight)).T
            self.check(operation(x, weight), plain(x) @ plain(weight).T, wide, scale)

    @pytest.mark.parametrize("biased", [False, True])
    @pytest.mark.parametrize("form", FORMS)
    def test_route(self, form: str, biased: bool) -> None:
        """The experts that the form names, and their weights."""
        how = FORMS[form]
        for dtype in DTYPES:
            if not self.subject().reasons(self._need("route", dtype)):
                break
        route, wide = self.operation("route", dtype), WIDE.get(dtype, "float32")
        for rows in (0, 1, 5, 33):
            logits = self.tensor(rows, EXPERTS, dtype=wide, scale=2.0)
            bias = self.tensor(EXPERTS, dtype=wide, seed=1, scale=0.3) if biased else None
            ids, weights = route(logits, bias, how)
            assert ids.dtype == torch.int32 and tuple(ids.shape) == (rows, how.top_k), f"{ids.dtype} {list(ids.shape)}"
            assert weights.dtype == logits.dtype and weights.shape == ids.shape
            for row in range(rows):
                wanted = route_one(plain(logits)[row], None if bias is None else plain(bias), how)
                found = dict(zip(ids[row].tolist(), plain(weights[row]), strict=True))
                assert set(found) == set(wanted), f"row {row} is sent to {sorted(found)}, not to {sorted(wanted)}"
                for expert, weight in wanted.items():
                    assert abs(found[expert] - weight) <= 1e-5 * (abs(weight) + 0.1), (found, wanted)

    def test_routing_what_is_no_number(self) -> None:
        """Rows of NaN and of infinities go to experts that there are: nothing reads beside the weights."""
        route = self.operation("route", "float32")
        logits = self.tensor(6, EXPERTS, dtype="float32")
        logits[0], logits[1, 3], logits[2], logits[3, :] = math.nan, math.inf, -math.inf, 3e38
        for form in FORMS.values():
            ids, _ = route(logits, None, form)
            assert ((ids >= 0) & (ids < EXPERTS)).all(), ids

    def _experts(
        self, dtype: str, act: ExpertAct, inner: int, size: int, bias: bool, count: int = EXPERTS
    ) -> tuple[Any, ...]:
        width = inner * (1 + act.gated)
        first = self.tensor(count, width, size, dtype=dtype, seed=1, scale=size**-0.5)
        last = self.tensor(count, size, inner, dtype=dtype, seed=2, scale=inner**-0.5)
        biases = (self.tensor(count, width, dtype=dtype, seed=3), self.tensor(count, size, dtype=dtype, seed=4))
        return first, last, *(biases if bias else (None, None))

    def _chosen(self, rows: int, per_token: int, dtype: str, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.tensor(rows, EXPERTS, dtype="float32", seed=seed).topk(per_token).indices.int()
        return ids, self.tensor(rows, per_token, dtype=WIDE.get(dtype, "float32"), seed=seed + 1).abs()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("inner", "size", "bias"), [(6, 8, True), (33, 70, False), (64, 64, True)])
    def test_experts(self, dtype: str, inner: int, size: int, bias: bool) -> None:
        """No token, one, few and many; one expert each, some, and all."""
        experts, pack = self.operation("experts", dtype), self.operation("pack_experts", dtype)
        given = self._experts(dtype, ExpertAct(), inner, size, bias)
        wide = [None if tensor is None else plain(tensor) for tensor in given]
        packed = pack(*(None if tensor is None else tensor.clone() for tensor in given))
        for rows, per_token in ((0, 2), (1, 1), (1, 3), (2, 2), (5, EXPERTS), (40, 2)):
            x, (ids, weights) = self.tensor(rows, size, dtype=dtype), self._chosen(rows, per_token, dtype)
            expected, scale = experts_of(plain(x), wide, ids.tolist(), plain(weights), ExpertAct())
            self.check(experts(x, packed, ids, weights, ExpertAct()), expected, dtype, scale, 4.0)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("act", ACTS)
    def test_acts_of_experts(self, dtype: str, act: str) -> None:
        """Everything that may stand between the projections, alone and within experts."""
        form = ACTS[act]
        gated = self.operation("gated_act", dtype)
        for rows in (0, 1, 9):
            x = self.tensor(rows, 2 * 40, dtype=dtype, scale=2.0)
            self.check(gated(x, form), act_of(plain(x), form), dtype)
        experts, pack = self.operation("experts", dtype), self.operation("pack_experts", dtype)
        given = self._experts(dtype, form, 24, 40, True)
        wide = [plain(tensor) for tensor in given]
        x, (ids, weights) = self.tensor(6, 40, dtype=dtype), self._chosen(6, 3, dtype)
        expected, scale = experts_of(plain(x), wide, ids.tolist(), plain(weights), form)
        self.check(experts(x, pack(*given), ids, weights, form), expected, dtype, scale, 4.0)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_experts_of_nobody(self, dtype: str) -> None:
        """An id of as many experts as there are adds nothing: one of a token's, all of them, and all tokens'."""
        experts, pack = self.operation("experts", dtype), self.operation("pack_experts", dtype)
        given = self._experts(dtype, ExpertAct(), 24, 40, True, count=EXPERTS - 3)
        wide, packed = [plain(tensor) for tensor in given], pack(*(tensor.clone() for tensor in given))
        for rows, per_token in ((1, 3), (2, 4), (40, 2)):
            x, (ids, weights) = self.tensor(rows, 40, dtype=dtype), self._chosen(rows, per_token, dtype)
            for chosen in (ids.clamp(max=EXPERTS - 3), torch.full_like(ids, EXPERTS - 3)):
                chosen[rows // 2] = EXPERTS - 3
                mine = [[one for one in row if one < EXPERTS - 3] for row in chosen.tolist()]
                by = [[w for w, one in zip(*each, strict=True) if one < EXPERTS - 3]
                      for each in zip(plain(weights).tolist(), chosen.tolist(), strict=True)]  # fmt: skip
                expected, scale = experts_of(plain(x), wide, mine, by, ExpertAct())
                self.check(experts(x, packed, chosen, weights, ExpertAct()), expected, dtype, scale, 4.0)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_places_of_experts(self, dtype: str) -> None:
        """A rank's own, the others nobody's; replicas take turns from token to token, and loads add up."""
        place = self.operation("place_experts", dtype)
        table = [[0, 5, 0], [1, 1, 1], [2, 6, 9], [3, 3, 3], [7, 4, 7], *([8, 8, 8] for _ in range(EXPERTS - 5))]
        first, load, counted = 3, torch.zeros(4, dtype=torch.int64, device=self.device), [0] * 4
        for rows in (0, 1, 50):
            ids = self._chosen(rows, 4, dtype)[0]
            found = place(ids, torch.tensor(table, dtype=torch.int32, device=self.device), first, load)
            assert found.dtype == torch.int32 and found.shape == ids.shape, f"{found.dtype} {list(found.shape)}"
            for row, (chosen, places) in enumerate(zip(ids.tolist(), found.tolist(), strict=True)):
                for one, got in zip(chosen, places, strict=True):
                    wanted = table[one][row % 3] - first
                    assert got == (wanted if 0 <= wanted < 4 else 4), f"expert {one} of token {row} is at {got}"
                    if 0 <= wanted < 4:
                        counted[wanted] += 1
            assert load.tolist() == counted, "the tokens that places get are miscounted"

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_gate(self, dtype: str) -> None:
        """One gate for each token."""
        x, gate = self.tensor(5, 33, dtype=dtype), self.tensor(5, 1, dtype=dtype, seed=1)
        expected = plain(x) / (1 + np.exp(-plain(gate)))
        self.check(self.operation("moe_gate", dtype)(x, gate), expected, dtype)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_an_experts_token_among_others(self, dtype: str) -> None:
        """The tokens beside it, and their choices, change nothing: each is what it is alone, nearly or in its bits."""
        experts, pack = self.operation("experts", dtype), self.operation("pack_experts", dtype)
        given = self._experts(dtype, ExpertAct(), 48, 64, False)
        packed, x = pack(*given), self.tensor(70, 64, dtype=dtype)
        ids, weights = self._chosen(70, 2, dtype)
        together = plain(experts(x, packed, ids, weights, ExpertAct()))
        exact = not self.subject().reasons(self._need("experts", dtype, batch_invariant=True))
        for row in (0, 1, 31, 69):
            one = slice(row, row + 1)
            alone = plain(experts(x[one], packed, ids[one], weights[one], ExpertAct()))
            assert np.allclose(alone, together[one], rtol=0 if exact else 2e-2, atol=0 if exact else 2e-2)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_captured_experts(self, dtype: str) -> None:
        """Routing and experts in one captured step: other tokens go to other experts when it is replayed."""
        names = ("router_logits", "route", "pack_experts", "experts")
        logits, route, pack, experts = (self.operation(name, dtype) for name in names)
        require_capture(cast("type[OpsCard]", self.subject().card).captured_by, self.device)
        platform = worker_context(self.subject(), self.device, dtype).platform
        assert platform is not None
        packed = pack(*self._experts(dtype, ExpertAct(), 24, 64, True))
        matrix, form = self.tensor(EXPERTS, 64, dtype="float32", seed=7), RouteForm(2, renormalise=True)
        x, left = self.tensor(4, 64, dtype=dtype), list[torch.Tensor]()

        def step() -> None:
            left[:] = [experts(x, packed, *route(logits(x, matrix), None, form), ExpertAct())]

        replay = platform.capture(step, CaptureKey(0, variant=(f"experts {dtype}",)))
        assert replay is not step, "the platform could not capture it, though the card names its recorder"
        out = left[0]
        experts(self.tensor(300, 64, dtype=dtype, seed=9), packed, *self._chosen(300, 3, dtype), ExpertAct())
        for seed in (1, 2, 3):
            given = self.tensor(4, 64, dtype=dtype, seed=seed)
            expected = experts(given, packed, *route(logits(given, matrix), None, form), ExpertAct()).clone()
            x.copy_(given)
            replay()
            assert torch.equal(out, expected), "the replay has kept who computes what, a value, or an address"

    @classmethod
    def _need(cls, operation: str, dtype: str, **more: Any) -> OpsNeed:
        return OpsNeed(operation=operation, dtype=dtype, device=cls.device, **more)


def route_one(logits: np.ndarray, bias: np.ndarray | None, form: RouteForm) -> dict[int, float]:
    """Expert -> weight of one token, by the definition."""
    if bias is not None and form.biased_logits:
        logits, bias = logits + bias, None
    if form.jitter is not None:
        found, left = dict[int, float](), dict(enumerate(logits.tolist()))
        for _ in range(form.top_k):
            chosen, best = max(left.items(), key=lambda pair: pair[1])
            near = [one for one in left.values() if (best - one) / max(abs(one), best) <= 2 * form.jitter]
            found[chosen] = 1 / sum(math.exp(one - best) for one in near)
            del left[chosen]
        return found
    exponents = np.exp(logits - logits.max())
    scores = 1 / (1 + np.exp(-logits)) if form.sigmoid else exponents / exponents.sum()
    choice = scores if bias is None else scores + bias
    size = len(choice) // form.groups
    groups = [range(first, first + size) for first in range(0, len(choice), size)]
    best = [sum(sorted(choice[list(group)])[-2 if form.pairs else -1 :]) for group in groups]
    is_open = sorted(range(form.groups), key=lambda group: -best[group])[: form.top_groups]
    among = itertools.chain.from_iterable(groups[group] for group in is_open) if form.groups > 1 else groups[0]
    chosen_ones = sorted(among, key=lambda expert: -choice[expert])[: form.top_k]
    total = sum(scores[expert] for expert in chosen_ones) if form.renormalise else 1.0
    return {expert: float(scores[expert] / total * form.scale) for expert in chosen_ones}


def act_of(x: np.ndarray, act: ExpertAct) -> np.ndarray:
    """x [..., 2 * I] or [..., I] -> [..., I]."""
    gate, up = np.split(x, 2, axis=-1) if act.gated else (x, np.ones_like(x))
    if act.kind == "clamped":
        gate, up = np.minimum(gate, act.limit), np.clip(up, -act.limit, act.limit)
        return np.asarray((up + 1) * gate / (1 + np.exp(-act.alpha * gate)))
    phi = np.vectorize(lambda one: (1 + math.erf(one / math.sqrt(2))) / 2, otypes=[np.float64])
    acts: dict[str, Any] = {
        "silu": lambda: gate / (1 + np.exp(-gate)),
        "gelu": lambda: gate * phi(gate),
        "gelu_tanh": lambda: gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2,
        "relu": lambda: np.maximum(gate, 0),
        "relu2": lambda: np.maximum(gate, 0) ** 2,
    }
    return np.asarray(acts[act.kind]() * up)


def experts_of(
    x: np.ndarray, given: list[Any], ids: list[list[int]], weights: Any, act: ExpertAct
) -> tuple[np.ndarray, np.ndarray]:
    """What a layer gives [T, H], and the size of its terms."""
    first, last, first_bias, last_bias = given
    out, scale = np.zeros((len(x), last.shape[1])), np.zeros((len(x), last.shape[1]))
    for token, chosen in enumerate(ids):
        for place, one in enumerate(chosen):
            inner = act_of(first[one] @ x[token] + (0 if first_bias is None else first_bias[one]), act)
            term = last[one] @ inner + (0 if last_bias is None else last_bias[one])
            out[token] += weights[token][place] * term
            scale[token] += abs(weights[token][place]) * (np.abs(last[one]) @ np.abs(inner) + 1)
    return out, scale
