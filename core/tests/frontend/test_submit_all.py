"""`AsyncLLM.submit_all`: all prompts are sent, or none is."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.types.errors import EngineDeadError, EngineError, InvalidRequestError
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine_kit.async_llm import AsyncLLM
from engine_kit.long_prompts import LONG, LongPrompts

PARAMS = SamplingParams(max_tokens=4, n=2)
DEAD = EngineDeadError("a request", "the core has died")


class Front(AsyncLLM):
    """Without cores: `sent` are the ids that the client was given and that nobody has aborted."""

    def __init__(self, doubles: ModuleType) -> None:
        tokenizer = doubles.CharTokenizer()
        self.inputs = InputProcessor(tokenizer, doubles.description(), 64 * LONG)
        self._output = OutputProcessor(tokenizer)
        self.recorder = self._output.observer = doubles.Recorder()
        self._client: Any = self
        self._death = None
        self.long = LongPrompts()
        self.sent: list[str] = []
        self.refuses = ""

    def add(self, requests: list[EngineRequest]) -> None:
        if requests[0].parent == self.refuses:
            raise DEAD
        self.sent += [one.request_id for one in requests]

    def abort(self, request_id: Any, error: EngineError | None = None) -> None:
        """Both the engine's, of one request, and the client's, of a list."""
        if isinstance(request_id, str):
            return super().abort(request_id, error)
        self.sent = [one for one in self.sent if one not in request_id]

    def nothing_is_left(self) -> bool:
        return not self.sent and not len(self._output) and not self._output.num_sequences


@pytest.fixture
def front(doubles: ModuleType) -> Front:
    return Front(doubles)


async def test_all_are_sent(front: Front) -> None:
    streams = await front.submit_all([("a", PARAMS, "0"), ("b", PARAMS, "1")])
    assert front.sent == ["0#0", "0#1", "1#0", "1#1"]
    for stream in streams:
        stream.close()
    assert front.nothing_is_left() and [reason for _, reason, _ in front.recorder.ends] == ["abort"] * 4


async def test_none_is_sent_where_a_prompt_is_refused(front: Front) -> None:
    with pytest.raises(InvalidRequestError):
        await front.submit_all([("a", PARAMS, "0"), ([10**6], PARAMS, "1")])
    assert front.nothing_is_left() and not front.recorder.arrivals


async def test_those_that_were_sent_come_back_where_the_client_fails(front: Front) -> None:
    front.refuses = "1"
    with pytest.raises(EngineDeadError):
        await front.submit_all([(text, PARAMS, str(i)) for i, text in enumerate("abc")])
    assert front.nothing_is_left() and front.recorder.arrivals == ["0", "1"]
    assert sorted(reason for _, reason, _ in front.recorder.ends) == ["abort", "abort", "error", "error"]


async def test_one_whose_id_is_in_use_does_not_end_who_has_it(front: Front) -> None:
    await front.submit("first", PARAMS, "1")
    with pytest.raises(InvalidRequestError, match="an unfinished request has that id"):
        await front.submit_all([("a", PARAMS, "0"), ("b", PARAMS, "1")])
    assert front.sent == ["1#0", "1#1"] and front._output.num_sequences == 2


@pytest.mark.parametrize("dies", [True, False])
async def test_none_is_sent_where_all_ends_while_they_are_tokenised(front: Front, dies: bool) -> None:
    """The engine dies; or the task is cancelled, as a client that leaves has it."""
    submitting = asyncio.create_task(front.submit_all([("a", PARAMS, "0"), ("b" * LONG, PARAMS, "1")]))
    await asyncio.sleep(0)
    assert not submitting.done()
    if dies:
        front._death = DEAD
    else:
        submitting.cancel()
    with pytest.raises(EngineDeadError if dies else asyncio.CancelledError):
        await submitting
    assert front.nothing_is_left()
