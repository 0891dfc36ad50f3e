"""What becomes of requests whose engine core has died: sent again where nothing was given out, else ended."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import pytest

from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_state import OutputKind, RequestState
from engine.types.errors import RankDeadError
from engine.types.outputs import CoreOutput, RequestOutput
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest, FinishReason

DEAD = RankDeadError("a request on rank 1", "signal 9", "send it again").parts


class Taken(NamedTuple):
    """What came of some news: outputs, and what the core was told."""

    outputs: list[RequestOutput]
    aborted: list[str]
    sent: list[list[EngineRequest]]


class Front:
    def __init__(self, doubles: ModuleType) -> None:
        self.doubles = doubles
        tokenizer = doubles.CharTokenizer()
        self.inputs = InputProcessor(tokenizer, doubles.description(), 64)
        self.outputs = OutputProcessor(tokenizer)
        self.observer = self.outputs.observer = doubles.Recorder()

    @property
    def reasons(self) -> list[str]:
        """Why the sequences ended, in order."""
        return [reason for _, reason, _ in self.observer.ends]

    def add(self, request_id: str, kind: OutputKind, **params: Any) -> RequestState:
        processed = self.inputs.process(request_id, "hi", SamplingParams(**params))
        self.outputs.add(processed, kind)
        return processed

    def take(self, *news: CoreOutput) -> Taken:
        client = self.doubles.Client()
        outputs = self.outputs.process(news, client)
        return Taken(outputs, client.aborted, client.sent)

    def news(self, *arguments: Any, **fields: Any) -> CoreOutput:
        output: CoreOutput = self.doubles.news(*arguments, **fields)
        return output


@pytest.fixture
def front(doubles: ModuleType) -> Front:
    return Front(doubles)


def dead(*names: str) -> list[CoreOutput]:
    return [CoreOutput(request_id=name, finish_reason=FinishReason.ERROR, error=DEAD) for name in names]


def test_a_whole_answer_is_computed_anew(front: Front) -> None:
    """Text, log probabilities and the detokeniser's half characters of the first attempt leave no trace."""
    processed = front.add("r", OutputKind.FINAL, logprobs=0, max_tokens=9)
    lp = front.doubles.logprobs
    front.take(front.news("r", "ab\u00e4", new_logprobs=lp(-1, -2, -3), num_cached_tokens=7))
    result = front.take(*dead("r"))
    assert (result.outputs, result.sent) == ([], [processed.requests])
    (output,) = front.take(front.news("r", "xyz", "length", new_logprobs=lp(-1, -1, -1))).outputs
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids) == ("xyz", [120, 121, 122])
    assert completion.cumulative_logprob == -3 and len(completion.logprobs or []) == 3
    assert (output.error, output.num_cached_tokens, output.finished) == (None, 0, True)
    assert len(front.outputs) == 0 and front.outputs.num_sequences == 0


@pytest.mark.parametrize("kind", [OutputKind.DELTA, OutputKind.CUMULATIVE])
def test_what_was_streamed_ends_with_an_error(front: Front, kind: OutputKind) -> None:
    front.add("told", kind)
    waiting = front.add("waiting", kind)
    front.take(front.news("told", "ab"))
    result = front.take(*dead("told", "waiting"))
    assert result.sent == [waiting.requests]
    (output,) = result.outputs
    assert output.request_id == "told" and output.finished
    assert isinstance(output.error, RankDeadError) and output.outputs[0].finish_reason == "error"
    assert front.reasons == ["error"] and front.observer.retries == 1


def test_siblings_begin_anew_together(front: Front) -> None:
    """One of them had ended already; none of them had been given out."""
    processed = front.add("r", OutputKind.FINAL, n=3)
    front.take(front.news("r#0", "ab", "stop"), front.news("r#1", "c"))
    result = front.take(*dead("r#1", "r#2"))
    assert result.sent == [processed.requests] and not result.outputs and not result.aborted
    assert front.outputs.num_sequences == 3
    (output,) = front.take(*(front.news(f"r#{i}", f"{i}", "stop", stop_reason=1) for i in range(3))).outputs
    assert [len(completion.token_ids) for completion in output.outputs] == [1, 1, 1] and output.finished


def test_once_is_enough(front: Front) -> None:
    """A request that has seen two cores die may be what they died of."""
    front.add("r", OutputKind.FINAL)
    assert front.take(*dead("r")).sent
    result = front.take(*dead("r"))
    assert not result.sent and isinstance(result.outputs[0].error, RankDeadError)


def test_a_deadline_is_not_put_off(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("engine.frontend.output_processor.time.monotonic", lambda: now[0])
    for name, timeout in (("long", 60.0), ("over", 5.0), ("none", None)):
        front.outputs.add(front.inputs.process(name, "hi", SamplingParams(), timeout=timeout), OutputKind.FINAL)
    now[0] += 20
    left = {again.request_id: again.timeout for (again,) in front.take(*dead("long", "over", "none")).sent}
    assert left["long"] == 40 and left["none"] is None
    assert left["over"] is not None and 0 < left["over"] < 0.001


def test_an_aborted_request_stays_aborted(front: Front) -> None:
    front.add("r", OutputKind.FINAL)
    front.outputs.abort(["r"])
    result = front.take(*dead("r"))
    assert not result.sent and not result.outputs


def test_a_retry_has_one_time_to_its_first_token(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    front.add("r", OutputKind.FINAL).arrived = 100.0
    for second, news in (
        (1, [front.news("r", "a")]),
        (2, dead("r")),
        (5, [front.news("r", "a")]),
        (6, [front.news("r", "b", "stop")]),
    ):
        now[0] = 100.0 + second
        front.take(*news)
    observer = front.observer
    ((sequence, reason, seconds),) = observer.ends
    assert (observer.retries, reason, seconds, sequence.num_tokens) == (1, "stop", 6.0, 2)
    assert sequence.last_token - sequence.first_token == 1.0
    assert observer.first == [1.0] and observer.later == [(1.0, 1)]


def test_one_of_several_that_had_ended_is_counted_once(front: Front) -> None:
    front.add("r", OutputKind.FINAL, n=2)
    front.take(front.news("r#0", "ab", "stop"))
    front.take(*dead("r#1"))
    front.take(*(front.news(f"r#{i}", "ab", "stop") for i in range(2)))
    assert front.reasons == ["stop", "stop"] and front.observer.retries == 1
