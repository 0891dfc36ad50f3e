"""The suite of point `logits_processor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from engine.interfaces.logits_processor import (
    PARAMETERS,
    LogitsProcessor,
    LogitsProcessorCard,
    LogitsProcessorNeed,
    LogitsRows,
)
from engine.types.errors import InvalidRequestError
from engine.types.params import SamplingParams, ThinkingBudget
from engine.types.plan import NewSlot
from engine_sdk.conformance.base import Conformance
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.timing import median_seconds

VOCAB, SLOTS, LENGTH = 256, 64, 40
"""Of the model and the engine in the context that bodies are built with; LENGTH of the table of tokens."""
EXAMPLES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "allowed_token_ids": ({"allowed_token_ids": [3]}, {"allowed_token_ids": [0, 255, 7]}),
    "logit_bias": (
        {"logit_bias": {3: 5.0, 200: -100.0}},
        {"logit_bias": {0: 0.25}},
        {"logit_bias": {255: -1.5, 4: 2.0}},
    ),
    "bad_words": (
        {"bad_words_token_ids": [[5]]},
        {"bad_words_token_ids": [[1, 2], [0], [2, 1, 3]]},
        {"bad_words_token_ids": [[2, 2]]},
    ),
    "thinking_budget": (
        {"thinking_budget": ThinkingBudget(tokens=0, end=[7, 8])},
        {"thinking_budget": ThinkingBudget(tokens=3, end=[2])},
        {"thinking_budget": ThinkingBudget(tokens=6, end=[1, 2], begin=[0])},
        {"thinking_budget": ThinkingBudget(tokens=9, end=[200, 3, 255], begin=[3, 1])},
    ),
}
"""Requests that use each of the parameters."""
OUTSIDE: Mapping[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [VOCAB]},
    "logit_bias": {"logit_bias": {VOCAB: 1.0}},
    "bad_words": {"bad_words_token_ids": [[1, VOCAB]]},
    "thinking_budget": {"thinking_budget": ThinkingBudget(tokens=1, end=[VOCAB])},
}
"""Requests with ids that the model has not got."""


@dataclass
class ProcessedRequest:
    """One request in a slot."""

    slot: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int

    @property
    def entered(self) -> NewSlot:
        """As the runner tells of it."""
        return NewSlot(
            slot=self.slot,
            request_id=f"r{self.slot}",
            token_ids=np.array(self.tokens, np.int32),
            num_prompt_tokens=self.num_prompt,
            params=self.params,
            stop_token_ids=np.empty(0, np.int32),
        )


def _forced(budget: ThinkingBudget | None, output: list[int]) -> int | None:
    """The one token that may follow this output; None where all may."""
    if budget is None or not 0 <= len(output) - budget.tokens < len(budget.end):
        return None
    thoughts = output[: budget.tokens]

    def written(ids: list[int]) -> bool:
        return any(thoughts[i : i + len(ids)] == ids for i in range(len(thoughts) - len(ids) + 1))

    thinking = (not budget.begin or written(budget.begin)) and not written(budget.end)
    return budget.end[len(output) - budget.tokens] if thinking else None


class LogitsProcessorConformance(Conformance):
    """Named rows are edited as the request's parameters say, in every batch alike; nothing else changes.

    Attributes:
        examples: keyword arguments of `SamplingParams`, a mapping for each of several requests that use the processor.
            Those of `PARAMETERS` need none: the suite has examples, and knows what is right.
    """

    point = "logits_processor"
    protocol = "LogitsProcessor"
    examples: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @classmethod
    def needs(cls) -> Sequence[LogitsProcessorNeed]:
        return [LogitsProcessorNeed(vocab_size=size, device=cls.device) for size in (VOCAB, 150_000)]

    @classmethod
    def impossible(cls) -> Sequence[LogitsProcessorNeed]:
        return [LogitsProcessorNeed(vocab_size=VOCAB, device=cls.device, framework="abacus")]

    @classmethod
    def described(cls) -> type[LogitsProcessorCard]:
        """The card, as what it is."""
        return cast("type[LogitsProcessorCard]", cls.subject().card)

    @classmethod
    def params(cls) -> list[SamplingParams]:
        """Requests that use the processor."""
        given = [*cls.examples]
        for name in PARAMETERS:
            given += EXAMPLES[name] if name in cls.described().parameters else ()
        if not given:
            pytest.skip('the suite names no requests that use it: set examples = [{"extra_args": {...}}, ...]')
        return [SamplingParams(max_tokens=8, seed=1, **fields) for fields in given]

    @classmethod
    def make(cls) -> LogitsProcessor:
        """A new body."""
        cls.require(LogitsProcessorNeed(vocab_size=VOCAB, device=cls.device))
        return cls.body()(worker_context(cls.subject(), cls.device, max_num_seqs=SLOTS))  # type: ignore[no-any-return]

    # -- scenes ------------------------------------------------------------------------------------------------------
    @classmethod
    def requests(cls, seed: int, count: int) -> list[ProcessedRequest]:
        """In different slots, with tokens of few kinds, so that words come up."""
        random, params = np.random.default_rng(seed), cls.params()
        found = []
        for i, slot in enumerate(random.permutation(SLOTS)[:count].tolist()):
            length = int(random.integers(1, LENGTH - 4))
            tokens = random.integers(0, 4, length).tolist()
            found.append(ProcessedRequest(slot, params[i % len(params)], tokens, int(random.integers(1, length + 1))))
        return found

    def applied(
        self,
        body: LogitsProcessor,
        places: Sequence[tuple[ProcessedRequest, int]],
        logits: torch.Tensor,
        rows: Sequence[int] | None,
        junk: int = 9,
    ) -> torch.Tensor:
        """`apply` of a copy of the logits, for places (request, tokens before the one to be drawn)."""
        table = torch.full((SLOTS + 1, LENGTH), junk, dtype=torch.int32)
        for request, _ in places:
            table[request.slot, : len(request.tokens)] = torch.tensor(request.tokens, dtype=torch.int32)
        slots = np.array([request.slot for request, _ in places], np.int64)
        counts = np.array([count for _, count in places], np.int64)
        edited = logits.clone()
        body.apply(
            edited,
            LogitsRows(
                row=None if rows is None else torch.tensor(list(rows), device=self.device),
                slot=torch.from_numpy(slots).to(self.device),
                num_prompt=torch.tensor([request.num_prompt for request, _ in places], device=self.device),
                num_tokens=torch.from_numpy(counts).to(self.device),
                tokens=table.to(self.device),
                host_slot=slots,
                host_num_tokens=counts,
                host_tokens=table.numpy() if self.described().host_tokens else None,
            ),
        )
        return edited

    def logits(self, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        """[count, VOCAB]."""
        drawn = np.random.default_rng(seed).normal(size=(count, VOCAB)) * 3
        return torch.from_numpy(drawn).to(dtype).to(self.device)

    def _expected(
        self, logits: torch.Tensor, places: Sequence[tuple[ProcessedRequest, int]], rows: Sequence[int]
    ) -> torch.Tensor:
        """From the definitions of the parameters, row by row."""
        found = logits.clone()
        for row, (request, count) in zip(rows, places, strict=True):
            params, output = request.params, request.tokens[request.num_prompt : count]
            names = self.described().parameters
            if "allowed_token_ids" in names and params.allowed_token_ids:
                keep = found[row, params.allowed_token_ids].clone()
                found[row] = -torch.inf
                found[row, params.allowed_token_ids] = keep
            if "bad_words" in names:
                for *before, last in params.bad_words_token_ids:
                    if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                        found[row, last] = -torch.inf
            if "logit_bias" in names:
                for token, bias in (params.logit_bias or {}).items():
                    found[row, token] += bias
            if "thinking_budget" in names and (forced := _forced(params.thinking_budget, output)) is not None:
                found[row] = -torch.inf
                found[row, forced] = 0.0
        return found

    # -- what is edited ----------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_as_the_parameters_say(self, dtype: torch.dtype) -> None:
        """Against their definitions, row by row, for requests of all kinds in one batch."""
        if not self.described().parameters:
            pytest.skip("the card honours none of the parameters that the suite knows")
        for seed in range(6):
            body, requests = self.make(), self.requests(seed, 12)
            for request in requests:
                body.enter(request.entered)
            places = [(request, len(request.tokens)) for request in requests]
            logits = self.logits(12, dtype, seed)
            found = self.applied(body, places, logits, None)
            expected = self._expected(logits, places, range(12))
            assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6), "other logits than the definition gives"

    def test_rows_that_are_not_named_stay(self) -> None:
        """Named ones are edited as they are where all rows are named."""
        body, requests = self.make(), self.requests(1, 6)
        for request in requests:
            body.enter(request.entered)
        places, rows, logits = [(r, len(r.tokens)) for r in requests], [8, 0, 5, 3, 9, 1], self.logits(11)
        found = self.applied(body, places, logits, rows)
        others = [row for row in range(11) if row not in rows]
        assert torch.equal(found[others], logits[others]), "a row that was not named has changed"
        alone = self.applied(body, places, logits[rows], None)
        assert torch.equal(found[rows], alone)

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        """Alone, or among others; with other requests in other slots."""
        for seed in range(4):
            body, requests = self.make(), self.requests(seed, 8)
            for request in requests:
                body.enter(request.entered)
            places, logits = [(r, len(r.tokens)) for r in requests], self.logits(8, seed=seed)
            together = self.applied(body, places, logits, None)
            for i, request in enumerate(requests):
                fresh = self.make()
                fresh.enter(request.entered)
                assert torch.equal(self.applied(fresh, places[i : i + 1], logits[i : i + 1], None)[0], together[i])

    def test_a_slot_in_several_rows(self) -> None:
        """With drafts a request has a row for each position, with as many tokens before it."""
        body, requests = self.make(), [r for r in self.requests(2, 12) if len(r.tokens) > 6][:3]
        for request in requests:
            body.enter(request.entered)
        places = [(r, len(r.tokens) - back) for r in requests for back in (3, 2, 1, 0)]
        logits = self.logits(len(places))
        together = self.applied(body, places, logits, None)
        for i, place in enumerate(places):
            assert torch.equal(self.applied(body, [place], logits[i : i + 1], None)[0], together[i])

    def test_a_slot_that_changes_hands(self) -> None:
        """What is kept of a request goes with it: the next one in its slot is served as in a new engine."""
        params = self.params()
        for first in params:
            for second in params:
                body, fresh = self.make(), self.make()
                body.enter(ProcessedRequest(5, first, [1, 2, 1, 2, 1], 2).entered)
                body.enter(ProcessedRequest(6, first, [1, 2, 1, 2, 1], 2).entered)
                request = ProcessedRequest(5, second, [2, 2, 1, 2, 2], 1)
                for each in (body, fresh):
                    each.enter(request.entered)
                logits = self.logits(1)
                found = self.applied(body, [(request, 5)], logits, None)
                assert torch.equal(found, self.applied(fresh, [(request, 5)], logits, None))

    def test_what_lies_past_the_tokens_is_not_read(self) -> None:
        """Whatever is left in the table."""
        body, requests = self.make(), self.requests(3, 8)
        for request in requests:
            body.enter(request.entered)
        places, logits = [(r, len(r.tokens)) for r in requests], self.logits(8)
        first = self.applied(body, places, logits, None, junk=2)
        assert torch.equal(first, self.applied(body, places, logits, None, junk=1))

    def test_applied_twice_alike(self) -> None:
        """`apply` keeps nothing: the same call gives the same."""
        body, requests = self.make(), self.requests(4, 8)
        for request in requests:
            body.enter(request.entered)
        places, logits = [(r, len(r.tokens)) for r in requests], self.logits(8)
        first = self.applied(body, places, logits, None)
        assert not torch.equal(first, logits), "nothing is ever edited"
        assert torch.equal(first, self.applied(body, places, logits, None))

    # -- who uses it -------------------------------------------------------------------------------------------------
    def test_who_uses_it(self) -> None:
        """The requests of the examples, and none that says nothing. What it claims is known, or its own."""
        card = self.described()
        assert card.parameters <= set(PARAMETERS), card.parameters - set(PARAMETERS)
        assert card.parameters or card.extra_args, "the card claims neither a parameter nor a key of extra_args"
        assert not card.used_by(SamplingParams(max_tokens=8))
        for params in self.params():
            assert card.used_by(params), f"{params} does not use it"
            card.verify(params, VOCAB)

    def test_ids_outside_the_vocabulary(self) -> None:
        """Refused in the frontend, by the parameter's name."""
        names = sorted(self.described().parameters)
        if not names:
            pytest.skip("the card honours none of the parameters that the suite knows")
        for name in names:
            with pytest.raises(InvalidRequestError, match=f"^{name}="):
                self.described().verify(SamplingParams(max_tokens=8, **OUTSIDE[name]), VOCAB)

    @classmethod
    def figure(cls) -> str | None:
        """What a step costs in which every row uses it."""
        suite, body = cls(), cls.make()
        requests = cls.requests(0, 32)
        for request in requests:
            body.enter(request.entered)
        places, logits = [(r, len(r.tokens)) for r in requests], suite.logits(32)
        seconds = median_seconds(lambda: suite.applied(body, places, logits, None), cls.device)
        return f"32 rows of {VOCAB} ids: {seconds * 1e6:,.0f} us"
