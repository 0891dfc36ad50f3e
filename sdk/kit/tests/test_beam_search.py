"""The search alone, over a toy model whose sequences can all be enumerated."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from engine.types.errors import InvalidRequestError
from engine.types.outputs import Logprob
from engine_kit.beam_search import MAX_BEAM_WIDTH, BeamSearchParams, search_beams, verify

EOS, VOCAB = 0, 4


class Markov:
    """Log probabilities from the last two tokens; the most likely `k` are told."""

    def __init__(self, seed: int, k: int = VOCAB) -> None:
        self.rng = random.Random(seed)
        self.k = k
        self.rows: dict[tuple[int, ...], list[float]] = {}
        self.calls: list[list[tuple[int, int]]] = []

    def row(self, tokens: list[int]) -> list[float]:
        key = tuple(tokens[-2:])
        if key not in self.rows:
            weights = [self.rng.random() ** 2 + 0.01 for _ in range(VOCAB)]
            self.rows[key] = [math.log(weight / sum(weights)) for weight in weights]
        return self.rows[key]

    def __call__(self, beams: list[tuple[int, list[int]]]) -> list[dict[int, Logprob]]:
        self.calls.append([(place, len(tokens)) for place, tokens in beams])
        found = []
        for _, tokens in beams:
            order = sorted(enumerate(self.row(tokens)), key=lambda entry: -entry[1])[: self.k]
            found.append({token: Logprob(value, rank + 1, str(token)) for rank, (token, value) in enumerate(order)})
        return found


def exhaustive(
    model: Markov, prompt: list[int], length: int, ends: bool, penalty: float
) -> list[tuple[float, list[int]]]:
    """(score, generated tokens) of every sequence, best first."""
    found: dict[tuple[int, ...], float] = {}
    for full in itertools.product(range(VOCAB), repeat=length):
        cut = full[: full.index(EOS) + 1] if ends and EOS in full else full
        total = sum(model.row([*prompt, *cut[:n]])[token] for n, token in enumerate(cut))
        found[cut] = total / len(cut) ** penalty
    return sorted(((score, list(tokens)) for tokens, score in found.items()), key=lambda entry: -entry[0])


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_the_tree_finds_the_best(seed: int, ends: bool, penalty: float) -> None:
    model, prompt = Markov(seed), [1, 3]
    params = BeamSearchParams(
        beam_width=VOCAB**4, max_tokens=4, ignore_eos=not ends, length_penalty=penalty, include_stop_str_in_output=True
    )
    (found,) = search_beams([prompt], params, eos_token_ids=[[EOS]], max_model_len=100, expand=model)
    expected = exhaustive(model, prompt, 4, ends, penalty)
    assert len(found) == len(expected)
    for sequence, (score, _) in zip(found, expected, strict=True):
        length = len(sequence.tokens) - len(prompt)
        assert sequence.cum_logprob / length**penalty == pytest.approx(score)
        assert len(sequence.logprobs) == length
        ended = ends and sequence.tokens[-1] == EOS
        assert (sequence.finish_reason, sequence.stop_reason) == (("stop", EOS) if ended else ("length", None))
    assert found[0].tokens == prompt + expected[0][1]


def test_narrow_beams_of_several_prompts_of_different_lengths() -> None:
    """Each prompt's result is what it gets alone; a prompt near the model's length stops sooner."""
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    prompts = [[1], [2, 3, 1, 2, 3, 1, 2], [3, 3]]
    model = Markov(9)
    together = search_beams(prompts, params, eos_token_ids=[[EOS]] * 3, max_model_len=9, expand=model)
    assert len(model.calls) == 5, "one batch a step"
    assert {place for place, _ in model.calls[1]} == {0, 1, 2} and {place for place, _ in model.calls[2]} == {0, 2}
    for prompt, expected in zip(prompts, together, strict=True):
        (alone,) = search_beams([prompt], params, eos_token_ids=[[EOS]], max_model_len=9, expand=model)
        assert alone == expected and len(alone) == 2
        assert all(EOS not in sequence.tokens for sequence in alone), "the end is left out of the tokens"


def test_nothing_is_left_when_every_candidate_ends() -> None:
    def expand(beams: list[tuple[int, list[int]]]) -> list[dict[int, Logprob]]:
        return [{EOS: Logprob(-0.5, 1, "")} for _ in beams]

    params = BeamSearchParams(beam_width=3, max_tokens=8)
    (found,) = search_beams([[5]], params, eos_token_ids=[[EOS]], max_model_len=100, expand=expand)
    assert [(s.tokens, s.finish_reason, s.cum_logprob) for s in found] == [([5], "stop", -0.5)]


@pytest.mark.parametrize(
    "fields",
    [
        {"beam_width": 0}, {"beam_width": MAX_BEAM_WIDTH + 1}, {"beam_width": True}, {"max_tokens": 0},
        {"temperature": 0.7}, {"temperature": float("nan")}, {"length_penalty": float("nan")},
        {"length_penalty": "1"}, {"ignore_eos": 1},
    ],
)  # fmt: skip
def test_params_are_verified(fields: dict[str, object]) -> None:
    verify(BeamSearchParams(beam_width=2, max_tokens=3))
    (name,) = fields
    with pytest.raises(InvalidRequestError, match=f"^{name}="):
        verify(BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields}))  # type: ignore[arg-type]
