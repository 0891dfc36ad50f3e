"""The sampler alone: what it asks of ops, what it skips, where it writes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.interfaces.ops import OPERATIONS
from engine.sampling.sampler import SampledRows, Sampler, SlotParameters
from engine.types.embeds import PromptEmbeds
from engine.types.params import SamplingParams
from engine.types.plan import NewSlot
from engine_kit.philox import uniform
from engine_reference.ops_torch.ops import TorchOpsBody
from engine_reference.platform_host.platform import HostPlatformBody

VOCAB, SLOTS = 20, 6


class CountingOps:
    """The reference operations, with the names of those that were called."""

    def __init__(self) -> None:
        self.called: list[str] = []
        body: Any = TorchOpsBody(None)  # type: ignore[arg-type]
        for name in OPERATIONS:
            setattr(self, name, self._count(name, getattr(body, name)))

    def _count(self, name: str, method: Any) -> Any:
        def call(*args: Any) -> Any:
            self.called.append(name)
            return method(*args)

        return call


class Bench:
    """A sampler with its tables."""

    def __init__(self) -> None:
        self.ops = CountingOps()
        self.platform = HostPlatformBody(SimpleNamespace(start=SimpleNamespace(device="cpu", size=1)))  # type: ignore[arg-type]
        self.uploads = 0
        self.tokens = torch.zeros(SLOTS + 1, 31, dtype=torch.int32)
        self.parameters = SlotParameters(SLOTS, VOCAB)
        self.sampler = Sampler(self.ops, self.platform, self.tokens, self.parameters)  # type: ignore[arg-type]

    def enter(
        self, slot: int, stop_ids: tuple[int, ...] = (), num_prompt: int = 4, num_embeds: int = 0, **fields: Any
    ) -> None:
        embeds = PromptEmbeds(key="", data=np.zeros((num_embeds, 8), np.float32)) if num_embeds else None
        self.parameters.enter(
            NewSlot(
                embeds=embeds,
                slot=slot, request_id="r", token_ids=np.zeros(num_prompt, np.int32), num_prompt_tokens=num_prompt,
                params=SamplingParams(**{"temperature": 0.0, "seed": 3, **fields}),
                stop_token_ids=np.array(stop_ids, np.int32),
            )
        )  # fmt: skip

    def draw(self, slots: list[int], num_tokens: list[int], logits: torch.Tensor | None = None) -> Any:
        if logits is None:
            logits = torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(0))
        self.ops.called.clear()
        return self.sampler(logits, SampledRows(np.array(slots, np.int32), np.array(num_tokens, np.int32)))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_nobody_asks_for_is_skipped(bench: Bench) -> None:
    bench.enter(0)
    bench.enter(1, presence_penalty=0.5)
    bench.enter(2, logprobs=0)
    bench.enter(3, min_tokens=2, stop_ids=(5,))
    bench.draw([0], [4])
    assert bench.ops.called == ["draw", "place_tokens"]
    bench.draw([0, 1], [4, 4])
    assert bench.ops.called == ["check_logits", "penalties", "sample", "place_tokens"]
    bench.draw([2], [4])
    assert bench.ops.called == ["check_logits", "sample", "place_tokens", "logprobs"]
    bench.draw([3, 0], [5, 9])
    assert bench.ops.called == ["check_logits", "mask_tokens", "sample", "place_tokens"]
    bench.draw([3, 0], [6, 9])
    assert bench.ops.called == ["check_logits", "sample", "place_tokens"]
    bench.enter(3)
    bench.draw([3, 2, 1], [4, 4, 4])
    assert bench.ops.called == ["check_logits", "penalties", "sample", "place_tokens", "logprobs"]


def test_tokens_go_where_the_next_step_reads_them(bench: Bench) -> None:
    for slot in range(3):
        bench.enter(slot)
    tokens, logprobs = bench.draw([2, 0], [7, 30])
    assert logprobs is None and tokens.dtype == torch.int32
    written = bench.tokens.nonzero().tolist()
    assert {(2, 7), (0, 30)} >= {tuple(place) for place in written}
    assert [int(bench.tokens[2, 7]), int(bench.tokens[0, 30])] == tokens.tolist()


def test_position_counts_outputs(bench: Bench) -> None:
    """The random number is f(seed, position in the output): the prompt's length does not matter."""
    flat = torch.zeros(1, VOCAB)
    for seed, num_prompt in ((3, 4), (2**64 - 1, 9), (-5, 2)):
        bench.enter(0, seed=seed, temperature=1.0, num_prompt=num_prompt)
        for position in range(6):
            tokens, _ = bench.draw([0], [num_prompt + position], flat.clone())
            u = uniform(np.array([seed & (2**64 - 1)], np.uint64), np.array([position]), 0)[0]
            assert tokens.item() == int(u * VOCAB)


def test_parameters_are_uploaded_when_rows_change(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot in range(3):
        bench.enter(slot, temperature=1.0)
    copies = []
    to_device = bench.platform.to_device
    monkeypatch.setattr(bench.platform, "to_device", lambda host, out: (copies.append(1), to_device(host, out)))

    def count(slots: list[int], num_tokens: int) -> int:
        copies.clear()
        bench.draw(slots, [num_tokens] * len(slots))
        return len(copies)

    first = count([0, 1], 4)
    assert count([0, 1], 5) == 1 < first, "only the positions"
    assert count([1, 0], 6) == first
    assert count([1, 0], 7) == 1
    bench.enter(1, temperature=0.0)
    assert count([1, 0], 8) == first, "the rows are the same, one of them holds another request"


def test_no_penalty_counts_placeholders(bench: Bench) -> None:
    """Rows with embeddings before their tokens are penalised as without, beside others."""
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    known = {0: [7, 8, 9, 9, 1], 1: [0] * 3 + [7, 8, 9, 9, 1], 2: [0] * 6, 3: [0] * 6 + [2, 2, 3]}
    for slot, tokens in known.items():
        given = (0, 3, 6, 6)[slot]
        bench.enter(slot, num_prompt=max(given, len(tokens) - 3), num_embeds=given, **penalties)
        bench.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)).repeat(4, 1)
    before = logits[0].clone()
    bench.draw([*known], [len(tokens) for tokens in known.values()], logits)
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], before)
    assert torch.equal(logits[2], before)
    assert set((logits[3] != before).nonzero().flatten().tolist()) == {2, 3}


def test_logprobs_are_from_before_everything(bench: Bench) -> None:
    bench.enter(0, logprobs=2, min_tokens=3, stop_ids=(1, 2, 500), repetition_penalty=5.0, temperature=0.1)
    bench.enter(1)
    bench.enter(2, logprobs=50)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[0, 1] = 9.0
    raw = logits.clone()
    bench.tokens[0, :4] = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    tokens, logprobs = bench.draw([0, 1, 2], [4, 4, 4], logits)
    assert tokens[0] != 1 and logprobs.places.tolist() == [0, 2]
    assert logprobs.top_ids.shape == (2, VOCAB), "more than there are is all"
    assert logprobs.top_ids[0, 0] == 1
    expected = torch.log_softmax(raw, dim=1)[[0, 2], tokens[[0, 2]].long()]
    torch.testing.assert_close(logprobs.chosen, expected)


def test_a_temperature_that_float32_cannot_hold_is_not_greedy_by_accident(bench: Bench) -> None:
    bench.enter(0, temperature=1e-60)
    assert bench.parameters.temperature[0] > 0
    tokens, _ = bench.draw([0], [4], torch.tensor([[0.0, 3.0, 3.0, *[0.0] * 17]]))
    assert tokens.item() in (1, 2)


def test_a_draft_of_such_a_temperature_says_what_it_was_drawn_from(bench: Bench) -> None:
    bench.enter(0, temperature=1e-60)
    logits = torch.tensor([[0.0, 3.0, 3.0, *[-torch.inf] * 17]])
    tokens, q = bench.sampler.draft(logits, np.array([0], np.int32), np.array([4], np.int32), with_probs=True)
    assert tokens.item() in (1, 2) and q is not None
    torch.testing.assert_close(q, torch.tensor([[0.0, 0.5, 0.5, *[0.0] * 17]]))
