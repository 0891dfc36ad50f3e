"""What tests of drivers that multiply by a library share: whole engines over its double, and on a GPU layers of real
models' sizes beside float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import SETTINGS, scores, tokens

from engine import LLM, SamplingParams
from engine_kit.by_expert import by_expert
from engine_kit.routing import ExpertAct

ROWS = (1, 3, 16, 64, 100, 256, 1000, 4096)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def hold_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, card: Any, oracle: str, max_tokens: int, near: float
) -> None:
    """Nobody names the driver of `card`, and the engine says with it what it says with the body `oracle`. near: of log
    probabilities, in the mean."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=1)

    def answers() -> list[Any]:
        with LLM(model=folder, dtype="bfloat16", **SETTINGS) as llm:
            return llm.generate(["Once upon a time"], greedy, use_tqdm=False)

    found = answers()
    monkeypatch.setattr(card, "body", oracle)
    expected = answers()
    assert tokens(found) == tokens(expected)
    assert np.abs(scores(found) - scores(expected)).mean() <= near


class Layers(ABC):
    """Layers of random codes: no checkpoint of this size is rounded in numpy.

    Args:
        body: the driver's.
        rounded: rows, as the driver rounds them -> float64.
    """

    def __init__(self, body: Any, rounded: Callable[[torch.Tensor], torch.Tensor], device: str = "cuda") -> None:
        self.body = body
        self.device = device
        self.random = torch.Generator(device).manual_seed(0)
        self._rounded = rounded

    @abstractmethod
    def layer(self, outputs: int, inputs: int, kind: str = "linear") -> tuple[Any, torch.Tensor]:
        """(packed, the weights that it stands for, float64)."""

    def rows(self, count: int, inputs: int) -> torch.Tensor:
        return torch.randn(count, inputs, generator=self.random, device=self.device).bfloat16()

    def hold_products(self, outputs: int, inputs: int, bound: float) -> None:
        packed, meant = self.layer(outputs, inputs)
        for count in ROWS:
            x = self.rows(count, inputs)
            near(self.body.linear(x, packed), self._rounded(x) @ meant.T, bound)

    def hold_experts(self, experts: int, chosen: int, hidden: int, inner: int, bound: float) -> None:
        """And a captured step gives what others chose later."""
        act, linear = ExpertAct(), self.layer
        made = [(linear(2 * inner, hidden, "expert"), linear(hidden, inner, "expert")) for _ in range(experts)]
        packed = self.body.pack_experts([(first[0], last[0]) for first, last in made])

        def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
            (_, first), (_, last) = made[expert]
            gate, up = (self._rounded(rows) @ first.T).bfloat16().double().chunk(2, dim=1)
            between = (torch.nn.functional.silu(gate) * up).bfloat16()
            return (self._rounded(between) @ last.T).bfloat16().double()

        def draw(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            scores = torch.rand(count, experts, generator=self.random, device=self.device)
            weights, ids = scores.topk(chosen)
            ids = ids.int()
            ids[0, 0] = experts  # nobody's
            return self.rows(count, hidden), ids, weights

        for count in (1, 16, 256, 2048):
            x, ids, weights = draw(count)
            expected = by_expert(x.double(), ids, weights.double(), experts, one)
            near(self.body.experts(x, packed, ids, weights, act), expected, bound)
        x, ids, weights = draw(16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.body.experts(x, packed, ids, weights, act)
        for tensor, other in zip((x, ids, weights), draw(16), strict=True):
            tensor.copy_(other)
        graph.replay()
        assert torch.equal(out, self.body.experts(x, packed, ids, weights, act))


def near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    apart = (found.double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert float(apart.max()) <= bound
