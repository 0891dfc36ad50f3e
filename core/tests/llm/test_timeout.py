"""Deadlines from the user to the core, offline and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from engine import LLM, AsyncLLM, EngineArgs, SamplingParams
from engine.errors import InvalidRequestError, RequestTimeoutError

LONG = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model="tiny", max_num_seqs=2, num_kv_pages=80) as llm:
        yield llm


def test_a_late_prompt_ends_with_a_typed_error_and_the_others_go_on(llm: LLM) -> None:
    with pytest.raises(RequestTimeoutError, match=r"finish request .* in 0\.05 s") as caught:
        llm.generate(["Once", "upon"], [LONG, SHORT], use_tqdm=False, timeout=[0.05, None])
    late, other = caught.value.outputs  # type: ignore[attr-defined]
    assert late.outputs[0].finish_reason == "error" and len(late.outputs[0].token_ids) < 450
    assert isinstance(late.error, RequestTimeoutError)
    assert other.outputs[0].finish_reason == "length"
    assert llm.llm_engine.stats().pages_used == 0
    assert llm.generate("Once", SHORT, use_tqdm=False, timeout=600)[0].finished


def test_a_late_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Once upon a time"}]
    with pytest.raises(RequestTimeoutError):
        llm.chat(messages, LONG, use_tqdm=False, timeout=0.05)
    assert llm.chat([messages, messages], SHORT, use_tqdm=False, timeout=[600, None])[1].finished
    with pytest.raises(InvalidRequestError, match="1 prompts with 2 priorities"):
        llm.chat(messages, SHORT, use_tqdm=False, priority=[1, 2])


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), "5", True])
def test_nonsense_is_refused(llm: LLM, timeout: object) -> None:
    with pytest.raises(InvalidRequestError, match="timeout="):
        llm.generate("a", SHORT, use_tqdm=False, timeout=timeout)  # type: ignore[arg-type]


def test_one_for_each(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 prompts with 1 timeouts"):
        llm.generate(["a", "b"], SHORT, use_tqdm=False, timeout=[1.0])


def test_async() -> None:
    async def use() -> None:
        llm = AsyncLLM(EngineArgs(model="tiny", num_kv_pages=80))
        try:
            await llm.start()
            with pytest.raises(RequestTimeoutError):
                async for _ in llm.generate("Once", LONG, timeout=0.05):
                    pass
            async for output in llm.generate("Once", SHORT, timeout=600):
                last = output
            assert last.finished
        finally:
            llm.shutdown()

    asyncio.run(use())
