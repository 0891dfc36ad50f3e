"""The chain of logits processors with the builtin ones: rules in numpy, several positions of one slot, what is free."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.interfaces.logits_processor import LogitsProcessorCard, LogitsRows
from engine.plugin import load_body
from engine.plugin.candidate import Candidate
from engine.sampling.processors import Processor, ProcessorChain
from engine.types.params import SamplingParams
from engine.types.plan import KnownTokens, NewSlot
from engine_reference.logits_processors.card import AllowedTokenIdsProcessor, BadWordsProcessor, LogitBiasProcessor
from engine_reference.platform_host.platform import HostPlatformBody

VOCAB, SLOTS, LENGTH = 12, 5, 20


def context() -> Any:
    start = SimpleNamespace(device="cpu", size=1, max_num_seqs=SLOTS, model=SimpleNamespace(vocab_size=VOCAB))
    platform = SimpleNamespace(to_device=lambda host, out: out.copy_(host))
    return SimpleNamespace(start=start, device=torch.device("cpu"), platform=platform)


class Recorder(LogitsProcessorCard):
    """Notes what it is given."""

    extra_args = frozenset({"note"})
    host_tokens = True


class RecorderBody:
    def __init__(self) -> None:
        self.entered: list[int] = []
        self.calls: list[LogitsRows] = []

    def enter(self, new: NewSlot) -> None:
        self.entered.append(new.slot)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        self.calls.append(rows)


def candidate(name: str) -> Candidate:
    return Candidate("logits_processor", name, 0, "tests", "1.0", "tests:Driver")


class Bench:
    def __init__(self) -> None:
        self.tokens = torch.zeros(SLOTS + 1, LENGTH, dtype=torch.int32)
        self.recorder = RecorderBody()
        builtin = [
            Processor(candidate(card.__name__), card, load_body(card)(context()))
            for card in (AllowedTokenIdsProcessor, BadWordsProcessor, LogitBiasProcessor)
        ]
        self.platform = HostPlatformBody(context())
        recorder = Processor(candidate("recorder"), Recorder, self.recorder)
        self.chain = ProcessorChain([*builtin, recorder], self.platform, self.tokens)
        self.prompts = np.zeros(SLOTS, np.int64)
        self.params: dict[int, SamplingParams] = {}

    def enter(self, slot: int, ids: list[int], num_prompt: int, **fields: Any) -> None:
        self.params[slot] = SamplingParams(**fields)
        self.prompts[slot] = num_prompt
        self.tokens[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.chain.enter(
            NewSlot(
                slot=slot, request_id="r", token_ids=np.array(ids, np.int32), num_prompt_tokens=num_prompt,
                params=self.params[slot], stop_token_ids=np.empty(0, np.int32),
            )
        )  # fmt: skip

    def apply(self, slots: list[int], num_tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        out = logits.clone()
        self.chain.apply(
            out, np.array(slots, np.int32), np.array(num_tokens, np.int32), torch.tensor(slots),
            torch.tensor(num_tokens), torch.tensor(self.prompts[slots]),
        )  # fmt: skip
        return out

    def plain(self, slot: int, n: int, row: torch.Tensor) -> torch.Tensor:
        row, params = row.clone(), self.params[slot]
        output = self.tokens[slot, int(self.prompts[slot]) : n].tolist()
        if params.allowed_token_ids is not None:
            row[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -torch.inf
        for *before, last in params.bad_words_token_ids:
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                row[last] = -torch.inf
        for token, bias in (params.logit_bias or {}).items():
            row[token] += torch.tensor(bias, dtype=torch.float32).to(row.dtype)
        return row


def words(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(3) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 9))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(25))
def test_batches_of_any_slots_and_positions(seed: int, dtype: torch.dtype) -> None:
    """Slots change hands; a slot stands in a batch once, or at several positions of its tokens as with drafts."""
    rng = random.Random(seed)
    bench = Bench()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(12):
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            bench.enter(
                slot,
                [rng.randrange(3) for _ in range(LENGTH)],
                rng.randint(1, 6),
                allowed_token_ids=rng.choice([None, None, [0, 1, 5], list(range(VOCAB))]),
                bad_words_token_ids=rng.choice(
                    [
                        [],
                        [[0]],
                        [[rng.randrange(3) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 9))],
                    ]
                ),
                logit_bias=rng.choice([None, {}, {rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(5)}]),
            )
        known = [slot for slot in range(SLOTS) if slot in bench.params]
        for _ in range(4):
            slots = [rng.choice(known) for _ in range(rng.randint(1, 9))]
            num_tokens = [rng.randint(int(bench.prompts[slot]), LENGTH) for slot in slots]
            logits = torch.randn(len(slots), VOCAB, dtype=dtype, generator=generator)
            got = bench.apply(slots, num_tokens, logits)
            for row, (slot, n) in enumerate(zip(slots, num_tokens, strict=True)):
                assert torch.equal(got[row], bench.plain(slot, n, logits[row])), (slot, n, bench.params[slot])


def test_what_nobody_uses_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    logits = torch.zeros(2, VOCAB)
    bench.enter(0, [1, 2], 2)
    bench.enter(1, [1, 2], 2, extra_args={"note": 1})
    assert bench.recorder.entered == [1], "only requests that use it"
    bench.apply([0, 0], [2, 2], logits)
    assert not bench.recorder.calls, "only rows that use it"
    bench.apply([0, 1], [2, 2], logits)
    (call,) = bench.recorder.calls
    assert call.row is not None and call.row.tolist() == [1] and call.host_slot.tolist() == [1]
    bench.apply([1, 1], [2, 3], logits)
    assert bench.recorder.calls[1].row is None and bench.recorder.calls[1].num_tokens.tolist() == [2, 3]
    copies: list[int] = []
    to_device = bench.platform.to_device
    monkeypatch.setattr(bench.platform, "to_device", lambda host, out: (copies.append(1), to_device(host, out)))
    bench.apply([1, 0], [2, 2], logits)
    bench.apply([1, 0], [3, 3], logits)
    assert len(copies) == 1, "rows are told to the device when they change"
    bench.enter(1, [3], 1)
    bench.apply([1, 0], [3, 3], logits)
    assert len(bench.recorder.calls) == 4, "who came into the slot does not use it"


def test_host_tokens_come_with_the_slot_and_then_one_by_one() -> None:
    bench = Bench()
    bench.enter(2, [4, 5, 6], 2, extra_args={"note": 1})
    known = KnownTokens(slot=np.array([2]), position=np.array([3]), token=np.array([9]))
    bench.chain.begin(SimpleNamespace(known=known))  # type: ignore[arg-type]
    bench.apply([2], [4], torch.zeros(1, VOCAB))
    (call,) = bench.recorder.calls
    assert call.host_tokens is not None and call.host_tokens[2, :4].tolist() == [4, 5, 6, 9]
