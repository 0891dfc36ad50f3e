"""Drafter `known`: right as often as it is told, and silent over what it does not know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.interfaces.drafter import DraftRows
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams
from engine.types.plan import NewSlot
from engine_drafters.known.card import KnownOptions
from engine_drafters.known.drafter import KnownDrafterBody
from engine_sdk.conformance import DrafterConformance
from engine_sdk.conformance import drafter as suite

VOCAB, LENGTH = 50, 4000


class Copies:
    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(host)


def made(answers: str, right: float) -> KnownDrafterBody:
    start = SimpleNamespace(model=SimpleNamespace(vocab_size=VOCAB))
    options = KnownOptions(answers=answers, right=right)
    context: Any = SimpleNamespace(options=options, start=start, platform=Copies())
    return KnownDrafterBody(context)


def new(slot: int, prompt: list[int]) -> NewSlot:
    return NewSlot(
        slot=slot, request_id=f"r{slot}", token_ids=np.array(prompt, np.int32), num_prompt_tokens=len(prompt),
        params=SamplingParams(seed=1), stop_token_ids=np.empty(0, np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
def test_drafts_are_right_as_often_as_it_is_told(tmp_path: Path, right: float) -> None:
    answer = np.random.default_rng(1).integers(0, VOCAB, LENGTH).tolist()
    file = tmp_path / "answers.json"
    file.write_text(json.dumps([[3, answer]]))
    drafter = made(str(file), right)
    drafter.enter(new(2, answer[:3]))
    drafter.enter(new(5, [1, 2, 3, 4]))
    session: Any = SimpleNamespace(tokens=torch.zeros(8, LENGTH, dtype=torch.int32))
    rows = DraftRows(np.array([2, 5]), np.array([3, 4]), np.array([LENGTH, 4]))
    drafts = drafter.propose(rows, session)
    assert drafts.counts is not None and drafts.counts.tolist() == [LENGTH - 3, 0]
    found = (drafts.tokens[0, : LENGTH - 3].numpy() == answer[3:]).mean()
    assert abs(found - right) < 0.03 and (found == right or right == 0.8)
    again = drafter.propose(rows._replace(num_tokens=np.array([9, 4])), session)
    assert torch.equal(again.tokens[0, : LENGTH - 9], drafts.tokens[0, 6 : LENGTH - 3]), "at each place the same"


@pytest.mark.parametrize("text", [None, "no JSON", '{"a": 1}', "[1]", "[[2, 3]]", '[["x", [3]]]', "[[1, [[2], 3]]]"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "answers.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"answers\.json.*number of the prompt's tokens"):
        made(str(file), 0.5)


class TestKnown(DrafterConformance):
    """Of prompts of one token, for each of which an answer is recorded."""

    driver, places = "known", frozenset({"answers"})

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _recorded(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        answers = np.random.default_rng(2).integers(0, suite.VOCAB, (suite.VOCAB, suite.LENGTH))
        answers[:, 0] = np.arange(suite.VOCAB)
        file = tmp_path_factory.mktemp("known") / "answers.json"
        file.write_text(json.dumps([[1, answer] for answer in answers.tolist()]))
        cls.options = {"answers": str(file)}

    def new_slot(self, slot: int, tokens: Sequence[int], salt: str | None) -> NewSlot:
        return msgspec.structs.replace(super().new_slot(slot, tokens, salt), num_prompt_tokens=1)
