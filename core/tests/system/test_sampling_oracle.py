"""Every way to choose tokens, through core, runner and sampler in float64, against the same rules in plain numpy over
the logits of a dense model."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import VOCAB, dense_logits
from schedules import Outcome, Planned, Schedule, Settings, run_schedule

from engine.types.params import SamplingParams


def _load(folder: str, name: str) -> Any:
    tests = Path(__file__).parents[3] / "plugins" / "reference" / "tests", Path(__file__).parents[1]
    path = next(path for one in tests if (path := one / folder / f"{name}.py").exists())
    spec = importlib.util.spec_from_file_location(f"system_tests_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


definition = _load("ops", "definition")
schedule = _load("system", "test_real_schedules")


def edited(row: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """One row of logits after the processors and penalties, rule by rule."""
    row = np.array(row, np.float64)
    if params.allowed_token_ids is not None:
        row[[token for token in range(VOCAB) if token not in params.allowed_token_ids]] = -np.inf
    for word in params.bad_words_token_ids:
        *before, last = word
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            row[last] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += np.float64(np.float32(bias))
    extra = params.extra_args or {}
    if "neighbours" in extra:
        last = (prompt + output)[-1]
        for beside in (1, -1):
            row[(last + beside) % VOCAB] += extra["neighbours"]
    if "window" in extra:
        row[(prompt + output)[-extra["window"] :]] = -np.inf
    return definition.penalise(
        row, prompt, output, params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    )


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    output: list[int] = []
    assert params.max_tokens is not None and params.seed is not None
    while len(output) < params.max_tokens:
        row = edited(dense_logits(prompt + output)[-1].numpy(), prompt, output, params)
        output.append(
            definition.sample(
                row, params.temperature, params.top_k, params.top_p, params.min_p, params.seed, len(output)
            )
        )
    return output


PROMPT = [int(token) for token in np.random.default_rng(8).integers(0, VOCAB, 13)]
PLAIN = SamplingParams(temperature=0.0, max_tokens=14, seed=5, ignore_eos=True)
FREE = expected(PROMPT, PLAIN)
"""What the model says greedily, so that the cases below are about tokens that would come."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias against": {"logit_bias": {FREE[0]: -100.0, FREE[3]: -7.3}},
    "bias for": {"logit_bias": {(FREE[0] + 1) % VOCAB: 100.0}},
    "small biases": {"logit_bias": {token: 0.1 * token for token in range(VOCAB)}, "temperature": 1.0},
    "allowed": {"allowed_token_ids": [3, 8, 14, 44], "temperature": 1.2},
    "one allowed": {"allowed_token_ids": [7]},
    "bad word of one token": {"bad_words_token_ids": [[FREE[0]]]},
    "bad word of two": {"bad_words_token_ids": [FREE[1:3]]},
    "bad word of four": {"bad_words_token_ids": [FREE[4:8], [1]]},
    "bad word longer than the output": {"bad_words_token_ids": [[*PROMPT[-2:], FREE[0]]]},
    "all pairs after a token": {"bad_words_token_ids": [[FREE[0], token] for token in range(VOCAB - 1)]},
    "penalties after processors": {"logit_bias": {1: 5.0, 2: 5.0}, "repetition_penalty": 1.25, "presence_penalty": 0.5},
    "together": {
        "allowed_token_ids": list(range(0, VOCAB, 2)), "bad_words_token_ids": [[4], [6, 8], [8, 6]],
        "logit_bias": {4: 50.0, 8: 3.0, 6: 3.0}, "temperature": 0.9, "top_k": 7, "frequency_penalty": 0.25,
    },
    "on the device": {"extra_args": {"neighbours": 2.5}, "temperature": 0.8},
    "on the host": {"extra_args": {"window": 6}},
}  # fmt: skip


def alone(params: SamplingParams) -> Outcome:
    host = "window" in (params.extra_args or {})
    return schedule.alone(Planned(request_id="r", prompt=tuple(PROMPT), params=params, host_tokens=host))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "-"))
def test_against_plain_rules(case: str) -> None:
    params = msgspec.structs.replace(PLAIN, **CASES[case])
    params.verify()
    answer = expected(PROMPT, params)
    assert alone(params).tokens == answer
    unharmed = ("plain", "bad word longer than the output")
    assert (answer == FREE) == (case in unharmed), "the case says nothing"


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_prompt_logprobs_over_chunks(chunk: int) -> None:
    """Whatever the chunks and the neighbours; with a cache full of the same prompt."""
    settings = Settings(
        num_pages=200, max_num_seqs=4, max_num_batched_tokens=chunk, max_model_len=40, in_flight=2,
        enable_prefix_caching=True,
    )  # fmt: skip
    rng = random.Random(1)
    other = tuple(rng.randrange(VOCAB) for _ in range(21))
    quiet = SamplingParams(temperature=0.0, max_tokens=3, seed=0, ignore_eos=True)
    requests = (
        Planned(request_id="first", prompt=other, params=quiet),
        Planned(
            request_id="scored", prompt=other, params=msgspec.structs.replace(quiet, prompt_logprobs=4), arrives=40
        ),
        Planned(
            request_id="zero", prompt=other[:9], params=msgspec.structs.replace(quiet, prompt_logprobs=0), arrives=40
        ),
        Planned(request_id="hits", prompt=other, params=quiet, arrives=90),
        Planned(request_id="one", prompt=other[:1], params=msgspec.structs.replace(quiet, prompt_logprobs=2)),
    )
    core, _ = schedule.make_core(settings)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    logprobs = dense_logits(list(other)).log_softmax(-1)
    for name, length, k in (("scored", 21, 4), ("zero", 9, 0), ("one", 1, 2)):
        got = outcomes[name].prompt_logprobs
        assert len(got) == length - 1
        for position, entry in enumerate(got):
            row = logprobs[position]
            assert entry.chosen == pytest.approx(row[other[position + 1]].item(), abs=1e-5)
            assert entry.rank == 1 + int((row > row[other[position + 1]]).sum())
            top = row.topk(k)
            assert entry.top_ids == top.indices.tolist()
            assert entry.top_values == pytest.approx(top.values.tolist(), abs=1e-5)
    assert outcomes["scored"].num_cached_tokens == 0 and outcomes["hits"].num_cached_tokens > 0
    assert outcomes["scored"].tokens == outcomes["hits"].tokens == outcomes["first"].tokens


def test_a_preempted_prompt_is_scored_once() -> None:
    """Prompts are preempted while they are computed and after: every token is scored once, in order."""
    settings = Settings(
        num_pages=12, max_num_seqs=5, max_num_batched_tokens=4, max_model_len=40, in_flight=2,
        enable_prefix_caching=True,
    )  # fmt: skip
    rng = random.Random(2)
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=tuple(rng.randrange(VOCAB) for _ in range(3 + 4 * i)),
            params=SamplingParams(temperature=0.0, max_tokens=17, seed=i, ignore_eos=True, prompt_logprobs=1),
            arrives=i,
        )
        for i in range(6)
    )
    core, _ = schedule.make_core(settings)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    assert core.stats().num_preemptions > 0
    for request in requests:
        schedule.check(request, outcomes[request.request_id])
        assert outcomes[request.request_id].finish_reason == "length"


def test_rows_that_need_host_tokens_wait_and_others_do_not() -> None:
    """A request whose processor reads tokens on the host makes half as many steps as its neighbour, two in flight."""
    settings = Settings(
        num_pages=200, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=40, in_flight=2,
        enable_prefix_caching=False,
    )  # fmt: skip
    params = msgspec.structs.replace(PLAIN, max_tokens=20)
    waits = msgspec.structs.replace(params, extra_args={"window": 3})
    core, executor = schedule.make_core(settings)
    for name, of, host in (("free", params, False), ("waits", waits, True)):
        core.add_request(Planned(request_id=name, prompt=tuple(PROMPT), params=of, host_tokens=host).to_request())
    got: dict[str, int] = {"free": 0, "waits": 0}
    while got["free"] < 20:
        for output in core.step().outputs:
            got[output.request_id] += len(output.new_token_ids)
    assert 9 <= got["waits"] <= 11
    assert executor.num_placeholders >= 18


@pytest.mark.parametrize("budget", [1, 2])
def test_a_row_that_waits_keeps_its_place_in_the_budget(budget: int) -> None:
    """Prompts of one token arrive while others wait for theirs: never do more requests decode than fit a step."""
    settings = Settings(
        num_pages=200, max_num_seqs=6, max_num_batched_tokens=budget, max_model_len=40, in_flight=2,
        enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=6, seed=0, ignore_eos=True)
    waits = msgspec.structs.replace(params, extra_args={"window": 2})
    requests = tuple(
        Planned(
            request_id=f"r{i}", prompt=(i,), params=params if i % 3 == 2 else waits, arrives=i, host_tokens=i % 3 != 2
        )
        for i in range(7)
    )
    core, _ = schedule.make_core(settings)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        schedule.check(request, outcomes[request.request_id])
