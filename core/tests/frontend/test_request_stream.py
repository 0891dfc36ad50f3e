"""What a slow reader finds is what a fast one was given."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.request_state import OutputKind, RequestState, RequestStream
from engine.types.errors import EngineDeadError, KVCacheTooSmallError
from engine.types.outputs import CompletionOutput, Logprob, RequestOutput
from engine.types.params import SamplingParams


def stream(kind: OutputKind, aborted: list[str]) -> RequestStream:
    return RequestStream(aborted.append, RequestState("r", None, [1], SamplingParams(), [], kind=kind))


def output(*completions: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], list(completions), finished)


def delta(index: int, token: int, finish: str | None = None) -> CompletionOutput:
    scores = [{token: Logprob(-1.0, 1, "x")}]
    return CompletionOutput(index, f"<{token}>", [token], scores, -1.0 * token, finish)


def total(outputs: list[RequestOutput]) -> dict[int, tuple[str, list[int], int, float | None, str | None]]:
    found: dict[int, tuple[str, list[int], int, float | None, str | None]] = {}
    for one in outputs:
        for c in one.outputs:
            text, ids, scores, _, finish = found.get(c.index, ("", [], 0, None, None))
            assert finish is None, "news after the end"
            more = len(c.logprobs or ())
            found[c.index] = text + c.text, ids + c.token_ids, scores + more, c.cumulative_logprob, c.finish_reason
    return found


@given(st.lists(st.tuples(st.sets(st.integers(0, 2), min_size=1), st.booleans()), max_size=20))
def test_deltas_are_put_together(steps: list[tuple[set[int], bool]]) -> None:
    """Each step brings tokens of some completions; the reader reads after some of the steps."""

    def news() -> list[RequestOutput]:
        made = [output(*(delta(i, step) for i in sorted(indices))) for step, (indices, _) in enumerate(steps)]
        return [*made, output(*(delta(i, 99, "length") for i in range(3)), finished=True)]

    async def run() -> list[RequestOutput]:
        source = stream(OutputKind.DELTA, [])
        got = []
        for one, read in zip(news(), [*(read for _, read in steps), False], strict=True):
            source.put(one)
            if read:
                got.append(await anext(source))
        return got + [rest async for rest in source]

    got = asyncio.run(run())
    assert len(got) == sum(read for _, read in steps) + 1
    assert total(got) == total(news())


async def test_of_cumulative_outputs_the_newest_counts() -> None:
    source = stream(OutputKind.CUMULATIVE, [])
    for length in range(1, 4):
        source.put(output(CompletionOutput(0, "x" * length), finished=length == 3))
    assert [one.outputs[0].text async for one in source] == ["xxx"]


async def test_an_error_comes_after_what_was_before_it() -> None:
    aborted: list[str] = []
    source = stream(OutputKind.DELTA, aborted)
    source.put(output(delta(0, 1)))
    source.fail(EngineDeadError("run", "it died"))
    assert (await anext(source)).outputs[0].text == "<1>"
    with pytest.raises(EngineDeadError):
        await anext(source)
    with pytest.raises(StopAsyncIteration):
        await anext(source)
    source.close()
    assert not aborted


async def test_an_error_of_one_ends_the_others() -> None:
    aborted: list[str] = []
    source = stream(OutputKind.DELTA, aborted)
    failed = output(CompletionOutput(1, finish_reason="error"))
    failed.error = KVCacheTooSmallError("compute", "no pages")
    source.put(failed)
    with pytest.raises(KVCacheTooSmallError):
        await anext(source)
    assert aborted == ["r"]


async def test_close_wakes_the_reader_and_aborts_once() -> None:
    aborted: list[str] = []
    source = stream(OutputKind.DELTA, aborted)
    reader = asyncio.ensure_future(anext(source, None))
    await asyncio.sleep(0)
    source.close()
    source.close()
    assert await asyncio.wait_for(reader, 5) is None
    assert aborted == ["r"]
