"""Priorities from the user to the scheduling policy, and refused where nobody heeds them."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from engine.errors import InvalidRequestError
from engine.llm import LLMEngine

ONE = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_urgent_requests_go_first() -> None:
    with LLM(model="tiny", max_num_seqs=1, num_kv_pages=40, scheduling_policy="priority") as llm:
        engine: LLMEngine = llm.llm_engine
        for name, priority in (("running", 0), ("patient", 5), ("urgent", -1), ("next", 1)):
            engine.add_request(name, "Hello", ONE, priority=priority)
        ended = [
            o.request_id for _ in range(40) if engine.has_unfinished_requests() for o in engine.step() if o.finished
        ]
        assert ended == ["urgent", "running", "next", "patient"]
        outputs = llm.generate(["a", "b"], ONE, use_tqdm=False, priority=[1, 0])
        assert [output.prompt for output in outputs] == ["a", "b"]
        with pytest.raises(InvalidRequestError, match="2 prompts with 1 priorities"):
            llm.generate(["a", "b"], ONE, use_tqdm=False, priority=[1])
        with pytest.raises(InvalidRequestError, match="not an integer"):
            llm.generate("a", ONE, use_tqdm=False, priority=["high"])  # type: ignore[list-item]


def test_a_policy_that_does_not_heed_them_refuses() -> None:
    with LLM(model="tiny", num_kv_pages=40) as llm:
        with pytest.raises(InvalidRequestError, match="does not order by it"):
            llm.generate("a", ONE, use_tqdm=False, priority=[1])
        assert llm.generate("a", ONE, use_tqdm=False, priority=[0])[0].finished
