"""Driver `deepep` on a stand-in of the library: threads in the place of GPUs, with the documented calls, shapes and
dtypes. It shows what the driver asks and makes of the answers, not that the library works."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine.interfaces.experts import ExpertsNeed
from engine.modeling import load_weights
from engine.types.errors import ConfigError
from engine.types.parallel import Parallel
from engine_kit.routing import ExpertAct, ExpertSpec
from engine_moe.dealt.card import DeepEPExperts, DeepEPOptions
from engine_moe.dealt.deepep import DeepEPBody
from engine_moe.ops_moe.body import MoeOpsBody
from engine_sdk.conformance.model.ranks import ThreadGroup, on_places

EXPERTS, HIDDEN, INNER, MOST = 6, 8, 4, 24
SPEC = ExpertSpec(EXPERTS, HIDDEN, INNER, ExpertAct(), ("e.{}.gate", "e.{}.up"), "e.{}.down")


class PlayedBuffer:
    """deep_ep.Buffer over a group of threads; says what its documentation says, and holds callers to it."""

    def __init__(self, group: ThreadGroup, nvlink: int, rdma: int, low_latency: bool = False, queues: int = 0) -> None:
        self.group = group
        self.low_latency = low_latency
        assert (nvlink > 0) != low_latency and (queues > 0) == low_latency

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and num_experts % self.group.size == 0
        self.each = num_experts // self.group.size
        goes = torch.zeros(len(topk_idx), self.group.size, dtype=torch.bool)
        goes.scatter_(1, topk_idx // self.each, True)
        return goes.sum(0).int(), None, torch.bincount(topk_idx.flatten(), minlength=num_experts).int(), goes, None

    def dispatch(
        self, x: torch.Tensor, *, topk_idx: Any, topk_weights: Any, is_token_in_rank: Any, **counts: Any
    ) -> Any:
        assert not self.low_latency and x.dtype == torch.bfloat16 and topk_weights.dtype == torch.float32
        assert set(counts) == {"num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert"}
        rank, token = is_token_in_rank.T.nonzero(as_tuple=True)
        sent = torch.bincount(rank, minlength=self.group.size)
        assert torch.equal(sent.int(), counts["num_tokens_per_rank"])
        received = self.group.all_to_all(sent, [1] * self.group.size, [1] * self.group.size)
        sizes = sent.tolist(), received.tolist()
        rows, places, by = (self.group.all_to_all(t[token], *sizes) for t in (x, topk_idx, topk_weights))
        local = places - self.group.rank * self.each
        local = torch.where((local >= 0) & (local < self.each), local, -1)
        each = [int((local == expert).sum()) for expert in range(self.each)]
        return rows, local, torch.where(local < 0, 0, by), each, (token, sizes, len(x)), None

    def combine(self, x: torch.Tensor, handle: Any) -> tuple[torch.Tensor, None, None]:
        assert x.dtype == torch.bfloat16
        token, (sent, received), count = handle
        back = self.group.all_to_all(x, received, sent)
        out = torch.zeros(count, x.shape[1], dtype=torch.float32)
        return out.index_add_(0, token, back.float()).bfloat16(), None, None

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, most: int, num_experts: int, use_fp8: bool
    ) -> Any:
        assert self.low_latency and not use_fp8 and x.dtype == torch.bfloat16 and topk_idx.dtype == torch.int64
        assert len(x) <= most
        each, padded = num_experts // self.group.size, torch.full((most, *topk_idx.shape[1:]), -1)
        padded[: len(x)] = topk_idx
        wide = torch.zeros(most, x.shape[1], dtype=x.dtype)
        wide[: len(x)] = x
        all_x, all_ids = self.group.all_gather(wide), self.group.all_gather(padded)
        rows = torch.full((each, most * self.group.size, x.shape[1]), float("nan"), dtype=x.dtype)
        whose = [(all_ids == self.group.rank * each + expert).any(1).nonzero()[:, 0] for expert in range(each)]
        for expert, tokens in enumerate(whose):
            rows[expert, : len(tokens)] = all_x[tokens]
        return rows, torch.tensor([len(tokens) for tokens in whose], dtype=torch.int32), (whose, most, each), None, None

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any
    ) -> Any:
        whose, most, each = handle
        terms = torch.zeros(each, most * self.group.size, x.shape[2])
        for expert, tokens in enumerate(whose):
            terms[expert, tokens] = x[expert, : len(tokens)].float()
        mine = self.group.all_gather(terms)[:, self.group.rank * most :][:, : len(topk_idx)]
        picked = mine[topk_idx, torch.arange(len(topk_idx)).unsqueeze(1)]
        return (picked * topk_weights.unsqueeze(-1)).sum(1).bfloat16(), None, None


class Operations(MoeOpsBody):
    """And those of linear layers, which experts in stacks do not call."""

    linear = pack_linear = None


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {
        f"e.{expert}.{part}.weight": torch.randn(shape, generator=draw) * 0.4
        for expert in range(EXPERTS)
        for part, shape in shapes.items()
    }


def case(core: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(core)
    tokens = (5, 0, 11)[core]
    ids = torch.rand(tokens, EXPERTS, generator=draw).topk(3).indices.int()
    return torch.randn(tokens, HIDDEN, generator=draw).bfloat16(), ids, torch.rand(tokens, 3, generator=draw)


def build(options: DeepEPOptions, parallel: Parallel, core: int, place: Any, groups: Any, **changes: Any) -> Any:
    start = SimpleNamespace(
        parallel=parallel,
        place=place,
        rendezvous="",
        max_num_batched_tokens=MOST,
        max_num_seqs=2,
        batch_invariant=False,
    )
    body = DeepEPBody(SimpleNamespace(options=options, start=start))  # type: ignore[arg-type]
    fields = {
        "ops": Operations(None), "quantization": {}, "covers": None, "adapters": None, "target": None,  # type: ignore[arg-type]
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "tp_rank": place.tp_rank, "tp_size": parallel.tp,
        "group": groups.get("tp"), "groups": groups,
    }  # fmt: skip
    layer = body.layer(SimpleNamespace(**{**fields, **changes}), SPEC)  # type: ignore[arg-type]
    load_weights(layer, tensors().items())
    return body, layer


@pytest.mark.parametrize("low_latency", [False, True])
@pytest.mark.parametrize(
    "parallel", [Parallel(tp=2, ep=True), Parallel(dp=3, ep=True), Parallel(tp=2, dp=3, ep=True)], ids=str
)
def test_numbers(parallel: Parallel, low_latency: bool) -> None:
    """As one rank computes them, nearly: bfloat16 travels."""

    def work(core: int, place: Any, groups: dict[str, ThreadGroup]) -> tuple[torch.Tensor, list[int]]:
        body, layer = build(DeepEPOptions(low_latency=low_latency), parallel, core, place, groups)
        nvlink, rdma, queues = (0, 1, 1) if low_latency else (1, 0, 0)
        body.__dict__["buffer"] = PlayedBuffer(groups["ep"], nvlink, rdma, low_latency, queues)
        return layer(*case(core)), body.tokens()

    found = on_places(parallel, work)
    reference, given = MoeOpsBody(None), tensors()  # type: ignore[arg-type]
    first = torch.stack([torch.cat([given[f"e.{e}.{p}.weight"] for p in ("gate", "up")]) for e in range(EXPERTS)])
    last = torch.stack([given[f"e.{e}.down.weight"] for e in range(EXPERTS)])
    packed = reference.pack_experts(first.bfloat16(), last.bfloat16(), None, None)
    for rank, (got, _) in enumerate(found):
        x, ids, weights = case(rank // parallel.tp)
        expected = reference.experts(x, packed, ids, weights, SPEC.act)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), expected.float(), rtol=3e-2, atol=3e-2)
    asked = sum(case(core)[1].numel() for core in range(parallel.dp))
    assert sum(sum(counts) for _, counts in found) == asked


@pytest.mark.parametrize("low_latency", [False, True])
def test_the_buffer_is_made_as_documented(low_latency: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    made: dict[str, Any] = {}

    class Config:
        def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
            assert (hidden_bytes, ranks) == (2 * HIDDEN, 2)
            return 100

        def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
            return 0

    class Buffer:
        def __init__(self, group: Any, nvlink: int = 0, rdma: int = 0, **more: Any) -> None:
            made.update(group=group, nvlink=nvlink, rdma=rdma, **more)

        get_dispatch_config = get_combine_config = staticmethod(lambda ranks: Config())

        @staticmethod
        def get_low_latency_rdma_size_hint(most: int, hidden: int, ranks: int, experts: int) -> int:
            assert (most, hidden, ranks, experts) == (MOST // 2, HIDDEN, 2, EXPERTS)
            return 4096

    played = ModuleType("deep_ep")
    played.Buffer = Buffer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_ep", played)
    asked: dict[str, Any] = {}
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **more: asked.update(more))

    def work(core: int, place: Any, groups: Any) -> None:
        body, _ = build(DeepEPOptions(low_latency=low_latency), Parallel(tp=2, ep=True), core, place, groups)
        if place.rank == 1:
            body.start.rendezvous = str(tmp_path)
            assert body.buffer is body.buffer

    on_places(Parallel(tp=2, ep=True), work)
    assert (asked["rank"], asked["world_size"]) == (1, 2)
    if low_latency:
        assert (made["nvlink"], made["rdma"], made["low_latency_mode"], made["num_qps_per_rank"]) == (0, 4096, True, 3)
    else:
        assert (made["nvlink"], made["rdma"]) == (100, 0)


@pytest.mark.parametrize(
    ("options", "changes", "says"),
    [
        (
            {"redundant": 1},
            {},
            r"places are 7, which 2 ranks do not have evenly(.|\n)*redundant=0, or that plus a multiple of 2",
        ),
        ({}, {"dtype": torch.float16}, "the library moves bfloat16, not torch.float16"),
    ],
)
def test_what_the_library_cannot_do_is_refused(options: Any, changes: Any, says: str) -> None:
    def work(core: int, place: Any, groups: Any) -> None:
        build(DeepEPOptions(**options), Parallel(tp=2, ep=True), core, place, groups, **changes)

    with pytest.raises(ConfigError, match=says):
        on_places(Parallel(tp=2, ep=True), work)


def test_reasons() -> None:
    (one, two, three) = DeepEPExperts.unsupported(ExpertsNeed(device="cpu", parallel=Parallel(tp=2)))
    assert "--enable-expert-parallel" in one and "NVIDIA" in two and "not installed" in three
    assert DeepEPExperts.unsupported(ExpertsNeed(device="cuda:0", parallel=Parallel(tp=2, ep=True))) == [three]
