"""A layer's routed experts at the sizes of Qwen3-30B-A3B and Mixtral-8x7B: the kernels of ops driver `triton`, torch's
grouped product, and a loop over experts.

python -m tests.gpu.bench_moe

Each is held against float64 first, with memory that nobody wrote full of NaN. Then it is replayed from a captured graph
on one choice of experts after the other, so that no weights are in the cache when their turn comes; the loop, which
waits for the device, is called. A kernel that breaks the device costs its own row: the others go on in a new process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine_kit.by_expert import by_expert
from engine_kit.routing import ExpertAct, RouteForm
from tests.gpu.ceilings import median_seconds
from tests.gpu.rows import Row, tell


class Shape(NamedTuple):
    """Of a layer."""

    experts: int
    chosen: int
    hidden: int
    inner: int


SHAPES = {"Qwen3-30B-A3B": Shape(128, 8, 2048, 768), "Mixtral-8x7B": Shape(8, 2, 4096, 14336)}
TOKENS = (1, 16, 256, 4096)
FEW = 16
"""Tokens up to which our kernels are launched as dependents too (`platform.dependents`)."""
CHECKED = 24
"""Tokens of a step that are computed in float64."""
SILU = ExpertAct()
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [T, H], ids [T, k], weights [T, k]) -> [T, H]."""


class Layer:
    """One layer's experts, of random numbers.

    Args:
        shape: its sizes.
        device: where they lie.
    """

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        self.device = device
        experts, _, hidden, inner = shape
        self.first = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device=device)
        self.last = torch.empty(experts, hidden, inner, dtype=torch.bfloat16, device=device)
        torch.manual_seed(0)
        for tensor in (self.first, self.last):
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
        self.logits = torch.randn(8 * max(TOKENS), experts, device=device)
        self.ops = self._drivers()

    def _drivers(self) -> dict[str, Any]:
        from engine_cuda.dependents import DEPENDENT, can_depend
        from engine_cuda.ops_triton.body import TritonOpsBody
        from engine_moe.ops_moe.body import MoeOpsBody

        nothing: Any = None
        found: dict[str, Any] = {"loop": MoeOpsBody(nothing), "triton": TritonOpsBody(nothing)}
        if self.device != "cpu" and can_depend(torch.device(self.device)):
            found["dependent"] = TritonOpsBody(nothing)
            found["dependent"].dependent = DEPENDENT
        return found

    def computes(self) -> dict[str, Compute]:
        """By name, the slowest first: whatever ours does to the device, the others are told."""

        def by(ops: Any) -> Compute:
            packed = ops.pack_experts(self.first, self.last, None, None)
            return lambda x, ids, weights: ops.experts(x, packed, ids, weights, SILU)

        found = {name: by(ops) for name, ops in self.ops.items()}
        grouped = {"torch._grouped_mm": self.grouped} if hasattr(torch, "_grouped_mm") else {}
        return {"loop": found.pop("loop"), **grouped, **found}

    def grouped(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """By torch's product of groups, as one would put it together of torch's operations without waiting."""
        tokens, chosen = ids.shape
        order = ids.flatten().argsort(stable=True)
        experts = torch.arange(self.shape.experts, dtype=ids.dtype, device=ids.device)
        ends = (ids.flatten()[None] <= experts[:, None]).sum(1, dtype=torch.int32)
        rows = x.index_select(0, order // chosen)
        gate, up = torch._grouped_mm(rows, self.first.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        given = torch._grouped_mm(F.silu(gate) * up, self.last.transpose(1, 2), offs=ends)
        terms = torch.empty_like(given).index_copy_(0, order, given).view(tokens, chosen, -1)
        return (terms * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def given(self, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, and the experts that a router of random logits would choose for them."""
        logits = self.logits[seed * tokens : (seed + 1) * tokens]
        ids, weights = self.ops["loop"].route(logits, None, RouteForm(self.shape.chosen, renormalise=True))
        random = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(tokens, self.shape.hidden, device=self.device, dtype=torch.bfloat16, generator=random)
        return x, ids, weights

    def expected(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """In float64."""

        def expert(index: int, rows: torch.Tensor) -> torch.Tensor:
            gate, up = F.linear(rows, self.first[index].double()).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, self.last[index].double())

        return by_expert(x.double(), ids, weights.double(), self.shape.experts, expert)


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated meanwhile is full of NaN until somebody writes it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(layer: Layer, compute: Compute, tokens: int) -> None:
    """Raises AssertionError where a token is far from float64."""
    x, ids, weights = layer.given(tokens, 0)
    with poisoned():
        found = compute(x, ids, weights)
    some = torch.linspace(0, tokens - 1, min(tokens, CHECKED), device=x.device).long()
    expected = layer.expected(x[some], ids[some], weights[some])
    assert found.isfinite().all(), f"{int((~found.isfinite()).any(1).sum())} of {tokens} rows hold what is no number"
    torch.testing.assert_close(found[some].double(), expected, rtol=0.03, atol=0.03)


def seconds(layer: Layer, compute: Compute, tokens: int, graph: bool) -> float:
    """Of one call, among calls that choose other experts each; 0 where there is no GPU."""
    given = [layer.given(tokens, seed) for seed in range(8 if tokens <= FEW else 2)]

    def launch() -> None:
        for x, ids, weights in given:
            compute(x, ids, weights)

    if layer.device == "cpu":
        launch()
        return 0.0
    if not graph:
        return median_seconds(launch, 4) / len(given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()  # compiles, and makes workspaces
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=side):
        launch()
    return median_seconds(recorded.replay) / len(given)


def work(layer: Layer, tokens: int) -> tuple[float, float]:
    """(bytes of the weights that must be read, and of rows in and out; operations) of one call."""
    experts, chosen, hidden, inner = layer.shape
    used = float(len(layer.given(tokens, 0)[1].unique())) if tokens < 4096 else experts
    return 2.0 * (used * 3 * hidden * inner + 2 * tokens * hidden), 6.0 * tokens * chosen * hidden * inner


def measure(layer: Layer, title: str, tokens: int) -> Row:
    """One line: all that there are, each with what it reaches or why it does not."""
    told: dict[str, float] = {}
    failed: list[str] = []
    for name, compute in layer.computes().items():
        if name == "dependent" and tokens > FEW:
            continue  # the gaps between its launches are nothing beside them
        try:
            check(layer, compute, tokens)
            told[name] = seconds(layer, compute, tokens, name != "loop")
        except Exception as error:  # the others are measured
            failed.append(f"{name}: {type(error).__name__}: {str(error).strip()[:160]}")
            if broken():
                break
    num_bytes, flops = work(layer, tokens) if not broken() else (0.0, 0.0)
    parts = [f"{name} {each * 1e6:,.1f} us" for name, each in told.items()]
    ours = min((told[name] for name in ("triton", "dependent") if name in told), default=0.0)
    if ours and "torch._grouped_mm" in told:
        parts.append(f"{told['torch._grouped_mm'] / ours:.2f} times torch's")
    return Row(
        what=f"experts {title}, {tokens:,} token{'s' * (tokens > 1)}",
        result=("failed: " if failed else "") + ", ".join([*failed, *parts]),
        gb_s=num_bytes / ours / 1e9 if ours else None,
        tflop_s=flops / ours / 1e12 if ours else None,
        share=("gb_s" if tokens <= 256 else "tflop_s") if ours else "",
    )


def broken() -> bool:
    """Whether the device answers no more in this process."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def main() -> None:
    """A row for each model and number of tokens."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_moe", description=__doc__)
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    flags.add_argument("--divide", type=int, default=1, help="sizes by this: for a try without a GPU")
    flags.add_argument("--after", type=int, default=0, help="rows that were told already")
    asked = flags.parse_args()
    cases = [(title, int(tokens)) for title in SHAPES for tokens in asked.tokens.split(",")]
    layer, of = None, ""
    for index, (title, tokens) in enumerate(cases[asked.after :], asked.after + 1):
        try:
            if layer is None or of != title:
                layer = None  # before the next one is made
                sizes = SHAPES[title]
                sizes = sizes._replace(hidden=sizes.hidden // asked.divide, inner=sizes.inner // asked.divide)
                layer, of = Layer(sizes, asked.device), title
            tell(measure(layer, title, tokens))
        except Exception as error:
            words = f"failed: {type(error).__name__}: {error}"[:240]
            tell(Row(what=f"experts {title}, {tokens:,} tokens", result=words))
        if broken():
            given = [argument for argument in sys.argv[1:] if not argument.startswith("--after")]
            os.execv(sys.executable, [sys.executable, "-m", "tests.gpu.bench_moe", *given, f"--after={index}"])


if __name__ == "__main__":
    main()
