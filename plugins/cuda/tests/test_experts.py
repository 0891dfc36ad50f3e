"""Mixtures of experts in Triton: what the suite of engine-sdk is too small for, beside torch in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from launches import Launches, _Noted, noted

from engine_cuda.interpreter import interpreted
from engine_cuda.ops_triton.body import TritonOpsBody
from engine_cuda.ops_triton.experts import FEW, PackedExperts, most_blocks, tile_of
from engine_kit.routing import ExpertAct, RouteForm
from engine_moe.ops_moe.body import MoeOpsBody

DEVICE = "cpu" if interpreted() else "cuda"
OPS, REFERENCE = TritonOpsBody(None), MoeOpsBody(None)  # type: ignore[arg-type]
SILU = ExpertAct()


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def layer(experts: int, hidden: int, inner: int, gated: bool = True, bias: bool = False) -> PackedExperts:
    random = torch.Generator().manual_seed(experts * hidden + inner)

    def tensor(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * shape[-1] ** -0.5).to(DEVICE)

    width = inner * (1 + gated)
    biases = (tensor(experts, width), tensor(experts, hidden)) if bias else (None, None)
    return PackedExperts(tensor(experts, width, hidden), tensor(experts, hidden, inner), *biases)


def check(
    x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, act: ExpertAct = SILU, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Near to what torch gives in float64 for the numbers as they are rounded."""
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    x, given = x.to(dtype), [None if each is None else each.to(dtype) for each in packed]
    found = OPS.experts(x, OPS.pack_experts(*given), ids, weights, act)  # type: ignore[arg-type]
    wide = MoeOpsBody(None).pack_experts(*(None if each is None else each.double() for each in given))  # type: ignore[arg-type]
    expected = REFERENCE.experts(x.double(), wide, ids, weights.double(), act)
    assert found.dtype == dtype and found.is_contiguous()
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    return found


def tokens(count: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def chosen(count: int, experts: int, each: int, seed: int = 1) -> torch.Tensor:
    scores = torch.rand(count, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(each).indices.int().to(DEVICE)


@pytest.mark.parametrize(
    ("count", "dtype", "rows"),
    [
        (20, torch.bfloat16, 16),
        (60, torch.bfloat16, 32),
        (110, torch.bfloat16, 64),
        (290, torch.bfloat16, 128),
        (290, torch.float16, 128),
        (290, torch.float32, 32),
    ],
)
def test_every_tile(count: int, dtype: torch.dtype, rows: int) -> None:
    """Experts that fill no block, one, and several; sizes that fill no tile."""
    experts = 5
    assert tile_of(count * 2, experts, dtype.itemsize, True).rows == rows
    ids = chosen(count, experts, 2)
    check(tokens(count, 72), layer(experts, 72, 150, bias=True), ids, dtype=dtype)


@pytest.mark.parametrize("act", [ExpertAct("relu2", gated=False), ExpertAct("clamped", alpha=1.7, limit=1.5)])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_acts(count: int, act: ExpertAct) -> None:
    """Of one token, of few and of sorted ones."""
    check(tokens(count, 48) * 3, layer(16, 48, 40, act.gated, bias=True), chosen(count, 16, 2), act)


@pytest.mark.parametrize("some", [[0, 1], [6, 3], [0, 6]])
def test_experts_whom_nobody_chose(some: list[int]) -> None:
    """All tokens go to two of seven."""
    ids = torch.tensor([some, some[::-1]], dtype=torch.int32, device=DEVICE).repeat(30, 1)
    check(tokens(60, 32), layer(7, 32, 24), ids)


@pytest.mark.parametrize("count", [1, 2, 60])
def test_nobodys_tokens(count: int) -> None:
    """What other ranks compute takes no part, and is read nowhere; also where all of a token's are, or of all."""
    ids = chosen(count, 9, 3)
    check(tokens(count, 32), layer(6, 32, 24, bias=True), ids.clamp(max=6))
    ids[count // 2] = 6
    check(tokens(count, 32), layer(6, 32, 24, bias=True), ids.clamp(max=6))
    check(tokens(count, 32), layer(6, 32, 24, bias=True), torch.full_like(ids, 6))


def test_places() -> None:
    """As torch finds them, where replicas take turns; loads add up over calls."""
    table = torch.tensor([[0, 5], [1, 1], [2, 6], [3, 3], [7, 4], [8, 8]], dtype=torch.int32, device=DEVICE)
    loads = torch.ones(2, 4, dtype=torch.int64, device=DEVICE)
    for count in (0, 1, 700):
        ids = chosen(count, 6, 3)
        found = OPS.place_experts(ids, table, 3, loads[0])
        expected = REFERENCE.place_experts(ids, table, 3, loads[1])
        assert found.dtype == torch.int32 and torch.equal(found, expected) and torch.equal(*loads)
    assert loads[0].sum() > 4


def test_a_view() -> None:
    """Rows that lie apart, and ids and weights that are not dense."""
    packed, ids = layer(6, 32, 24), chosen(9, 6, 4)
    check(tokens(9, 80)[:, 40:72], packed, ids[:, ::2])
    check(tokens(32, 9).T, packed, ids[:, ::2])


def test_the_same_bits_each_time_and_for_one_token_among_others() -> None:
    """Blocks of rows change nothing in a row, whichever it is; the sort is stable."""
    packed, ids, x = layer(4, 64, 48), chosen(120, 4, 2), tokens(120, 64)
    whole = check(x, packed, ids, dtype=torch.bfloat16)
    turned = check(x.flip(0), packed, ids.flip(0), dtype=torch.bfloat16)
    assert torch.isfinite(turned).all() and torch.equal(whole, check(x, packed, ids, dtype=torch.bfloat16))


def test_what_is_no_number_stays_so() -> None:
    """Nothing between the projections hides it."""
    packed = layer(8, 16, 8, bias=True)
    packed.first.fill_(float("nan"))
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped"):
        for count in (1, 24):
            found = OPS.experts(
                tokens(count, 16), packed, chosen(count, 8, 1), torch.ones(count, 1, device=DEVICE),
                ExpertAct(kind, alpha=1.0, limit=7.0),
            )  # fmt: skip
            assert found.isnan().all(), (kind, count)


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
def test_no_more_blocks_than_programs(rows: int) -> None:
    """Whoever has how many: the launch covers them."""
    random = torch.Generator().manual_seed(rows)
    for experts in (1, 3, 128):
        for pairs in (1, 2, 17, 300, 4096):
            even = torch.bincount(torch.arange(pairs) % experts, minlength=experts)
            skewed = torch.multinomial(torch.rand(experts, generator=random) ** 8 + 1e-6, pairs, True, generator=random)
            for counts in (even, torch.bincount(skewed, minlength=experts)):
                assert int((-(-counts // rows)).sum()) <= most_blocks(pairs, experts, rows)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, ["router_logits_kernel", "route_kernel", "few_first_kernel", "few_last_kernel"]),
        (
            16,
            ["router_logits_kernel", "route_kernel", "sort_kernel", "first_kernel", "last_kernel", "combine_kernel"],
        ),
    ],
)
def test_launches_depend_on_shapes_alone(count: int, expected: list[str]) -> None:
    """On a device whose tensors have no values: nothing is read on the host, and nothing is copied."""
    experts, each = 16, 4
    assert (count == 1) or FEW * count * each > experts
    with noted():
        _Noted.now = launches = Launches()
        try:
            x, matrix = torch.empty(count, 32, device="meta"), torch.empty(experts, 32, device="meta")
            packed = OPS.pack_experts(
                torch.empty(experts, 48, 32, device="meta"), torch.empty(experts, 32, 24, device="meta"), None, None
            )
            ids, weights = OPS.route(OPS.router_logits(x, matrix), None, RouteForm(each, renormalise=True))
            assert OPS.experts(x, packed, ids, weights, SILU).shape == x.shape
        finally:
            _Noted.now = None
    assert launches.outside == expected
