"""Decode steps as one launch, held to what `engine.interfaces.step.WholeSteps` says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.interfaces.ops import SamplingRows, StepInputs, StepTables
from engine.interfaces.platform import Platform, Trial

ROWS, SLOTS, STEPS, BLOCK, VOCABULARY = 3, 4, 30, 4, 97
HEADER, WORDS = 16, 4
"""int32 words of a step's four arrays, and of one new page behind them."""


class _Draws:
    """Of the operations those that a whole step launches itself. Nothing is drawn at random."""

    def draw(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(dim=1).int(), logits.isnan().any(dim=1)

    def place_tokens(
        self, tokens: torch.Tensor, broken: torch.Tensor, table: torch.Tensor, slot: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        table[slot, place] = tokens
        return tokens.clone()


class _Model:
    """Its next token is the last one and the row's pages of two tables, all added up."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.host = torch.zeros(HEADER + WORDS * (1 + 2 * ROWS), dtype=torch.int32)
        self.sent = torch.zeros_like(self.host, device=platform.device)
        tokens, *blocks = (
            torch.zeros(SLOTS + 1, width, dtype=torch.int32, device=platform.device) for width in (STEPS + 2, 9, 10)
        )
        self.tables = StepTables(tokens, tuple(blocks), (BLOCK, BLOCK))
        slot, computed, lengths, starts = self.sent[:HEADER].view(4, -1)
        none = torch.zeros(0, dtype=torch.int32, device=platform.device)
        self.inputs = StepInputs(slot[:ROWS], computed[:ROWS], starts, lengths[:ROWS], none, none, (), ())
        self.logits = torch.zeros(ROWS, VOCABULARY, device=platform.device)
        self.parameters = SimpleNamespace(version=0, vocab_size=VOCABULARY, seed=np.zeros(SLOTS, np.int64))
        for name in ("temperature", "top_p", "min_p"):
            setattr(self.parameters, name, np.zeros(SLOTS, np.float32))
        for name in ("top_k", "num_prompt"):
            setattr(self.parameters, name, np.zeros(SLOTS, np.int32))

    def compute(self) -> None:
        slot, place = self.inputs.slot_of_row.long(), self.inputs.num_computed.long()
        token = self.tables.tokens[slot, place].long()
        for table in self.tables.blocks:
            token = token + table[slot, place // BLOCK]
        self.logits.zero_().scatter_(1, (token % VOCABULARY)[:, None], 1.0)

    def send(self, slots: np.ndarray, computed: np.ndarray, news: list[tuple[int, int, int, int]]) -> None:
        """A step of these rows and others that pad it. Behind the new pages stands what steps before have left."""
        header, listed = self.host[:HEADER].numpy().reshape(4, -1), self.host[HEADER:].numpy().reshape(-1, WORDS)
        header[0], header[1], header[2], header[3] = SLOTS, 0, 1, np.arange(ROWS + 1)
        header[0, : len(slots)], header[1, : len(slots)], header[2, : len(slots)] = slots, computed, computed + 1
        listed[0] = len(news), 0, 0, 0
        for place, new in enumerate(news, 1):
            listed[place] = new
        end = HEADER + WORDS * (1 + len(news))
        self.platform.to_device(self.host[:end], self.sent[:end])


def check_whole_steps(platform: Any) -> bool:
    """Each launch puts its new pages into the tables before anything reads them, and tells its own tokens, whichever
    of many launches is waited for first. False where the platform makes no whole steps."""
    made = _Model(platform)
    if (whole := platform.whole_steps(_Draws(), made.tables, made.parameters, [])) is None:
        return False
    trial = Trial(lambda number: None, lambda: (made.logits,))
    launch = whole.capture(made.inputs, made.sent[HEADER:], made.compute, trial)
    assert launch is not None, "a step of torch's own operations is not captured"
    for cleared in (made.tables.tokens, *made.tables.blocks):
        cleared.zero_()
    tokens, pages, expected, told = np.zeros((SLOTS, STEPS + 1), int), np.zeros((2, SLOTS, 9), int), [], []
    computed = np.zeros(SLOTS, int)
    for step in range(STEPS):
        slots = (np.arange(1 + step % ROWS) + step) % SLOTS
        begin = [int(slot) for slot in slots if computed[slot] % BLOCK == 0]
        news = [(table, slot, int(computed[slot]) // BLOCK, 1 + 7 * step + table) for table in (0, 1) for slot in begin]
        for table, slot, index, number in news:
            pages[table, slot, index] = number
        made.send(slots, computed[slots], news)
        told.append(launch(len(slots)))
        drawn = tokens[slots, computed[slots]] + pages[:, slots, computed[slots] // BLOCK].sum(axis=0)
        expected.append((drawn % VOCABULARY).tolist())
        computed[slots] += 1
        tokens[slots, computed[slots]] = expected[-1]
    for step in reversed(range(STEPS)):
        (found,) = told[step].wait()
        assert told[step].done() and found.device.type == "cpu"
        assert found.tolist() == expected[step], f"step {step} tells other tokens"
    found_pages = [table[:SLOTS, :9].cpu().tolist() for table in made.tables.blocks]
    assert found_pages == pages.tolist(), "the tables have other pages than were sent"
    return True
