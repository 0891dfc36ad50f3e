"""Requests of every kind that come and go: several completions, stop strings, masks, drafts, aborts. What is finished
equals the torch engine's, in float64, where no batch changes a token."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax_engines import jax_engine, torch_engine, worker_of

from engine import SamplingParams
from engine.types.structured_outputs import StructuredOutputsParams

CHOICES = ["the dog and the dog and the cat", "the dog and a fox", "a dog"]
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2},
    {"stop": ["e", " a"]},
    {"n": 2, "stop": ["the"], "include_stop_str_in_output": True},
    {"structured_outputs": StructuredOutputsParams(choice=CHOICES)},
    {"structured_outputs": StructuredOutputsParams(regex="[a-d ]{3,9}"), "n": 2},
    {"logprobs": 2, "repetition_penalty": 1.3},
)
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 5),  # the step before which it comes
        st.one_of(st.none(), st.integers(1, 9)),  # steps after which it is aborted
        st.sampled_from(["the dog and the dog and", "once upon a time", "a", "one two three " * 6]),
        st.sampled_from(KINDS),
        st.sampled_from([0.0, 0.8]),
    ),
    min_size=2,
    max_size=6,
)


@pytest.mark.slow
def test_requests_that_come_and_go() -> None:
    """In any order, beside others that are aborted at any moment."""
    few: dict[str, Any] = {"dtype": "float64", "max_num_seqs": 4, "num_kv_pages": 24}
    more = {"drafter": {"adaptive": "false", "num_tokens": "2"}}
    with torch_engine("tiny", **few) as other, jax_engine("tiny", more_options=more, drafter="ngram", **few) as mine:

        @given(REQUESTS)
        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        def run(requests: list[tuple[int, int | None, str, dict[str, Any], float]]) -> None:
            params = [
                SamplingParams(
                    temperature=t, seed=nth, max_tokens=12, ignore_eos="structured_outputs" not in kind, **kind
                )
                for nth, (_, _, _, kind, t) in enumerate(requests)
            ]
            wanted = other.generate([prompt for _, _, prompt, _, _ in requests], params, use_tqdm=False)
            engine, found, step = mine.llm_engine, {}, 0
            while step <= 5 or engine.has_unfinished_requests():
                for nth, (comes, goes, prompt, _, _) in enumerate(requests):
                    if comes == step:
                        engine.add_request(str(nth), prompt, params[nth])
                    if goes is not None and comes + goes == step:
                        engine.abort_request(str(nth))
                for output in engine.step():
                    if output.finished:
                        found[int(output.request_id)] = output
                step += 1
            for nth, output in found.items():
                for a, b in zip(output.outputs, wanted[nth].outputs, strict=True):
                    if a.finish_reason != "abort":
                        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
            assert all(nth in found for nth, (_, goes, *_) in enumerate(requests) if goes is None)

        run()
        assert worker_of(mine)._runner._steps.compiled.met == 0
