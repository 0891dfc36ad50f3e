"""Doubles: a tokenizer whose tokens are characters, a core that says what a script tells it to, an observer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.frontend.request_state import RequestState, SequenceState
from engine.types.errors import EngineError
from engine.types.model import ModelDescription
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats, TokenLogprobs
from engine.types.request import EngineRequest, FinishReason
from engine_kit.chat_messages import text_messages

EOS = 0
VOCAB = 1000


class CharTokenizer:
    """Id = code point; ids from 900 are special; id 0 is the end. "\\x02" opens a text."""

    vocab_size = VOCAB
    eos_token_ids = (EOS, VOCAB + 5)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        text.encode()  # lone surrogates are no text
        return [*([2] if add_special_tokens and text else []), *map(ord, text)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        stream = self.stream(skip_special_tokens)
        return stream.push(ids) + stream.flush()

    def token(self, token_id: int) -> str:
        return chr(token_id)

    def stream(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> CharStream:
        return CharStream(skip_special_tokens)

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        text = "".join(f"{message['role']}:{message['content']};" for message in text_messages(messages))
        return text + ("!" if options["add_generation_prompt"] else "")


class CharStream:
    """An "ä" (228) is the first half of a character: it waits for what follows, and is then written as "Ä"."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.half = False

    def push(self, ids: Sequence[int]) -> str:
        out = ""
        for token in ids:
            if token == EOS or (self.skip and token >= 900):
                continue
            out += ("Ä" if self.half else "") + ("" if token == 228 else chr(token))
            self.half = token == 228
        return out

    def flush(self) -> str:
        half, self.half = self.half, False
        return "�" if half else ""


def description(**changes: Any) -> ModelDescription:
    facts: dict[str, Any] = {
        "architecture": "X", "dtype": "float32", "vocab_size": VOCAB, "hidden_size": 1, "num_layers": 0,
        "num_q_heads": 1, "max_model_len": 64, "kv_specs": (), "eos_token_ids": (EOS,),
    }  # fmt: skip
    return ModelDescription(**(facts | changes))


def news(request_id: str, text: str | Iterable[int] = "", finish: str | None = None, **fields: Any) -> CoreOutput:
    """What the core says: a string's characters as tokens."""
    ids = [ord(c) for c in text] if isinstance(text, str) else list(text)
    reason = None if finish is None else FinishReason(finish)
    return CoreOutput(request_id=request_id, new_token_ids=ids, finish_reason=reason, **fields)


def logprobs(*chosen: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(value, 2, [65, 66], [-0.1, -0.2]) for value in chosen]


class ScriptedCore:
    """Echoes: each request gets the answer that `answers` has for its prompt, `per_step` tokens a step.

    Attributes:
        answers: prompt text to (text, finish reason); others get "ok" and end with "stop".
        fail_at: request ids at which `add_request` raises.
        raise_at_step: (number of the step, error) at which `step` raises, once.
    """

    def __init__(self, answers: dict[str, tuple[str, str]] | None = None, per_step: int = 1) -> None:
        self.answers = answers or {}
        self.per_step = per_step
        self.running: dict[str, tuple[EngineRequest, list[int], str, int]] = {}
        self.aborted: list[str] = []
        self.requests: list[EngineRequest] = []
        self.fail_at: dict[str, EngineError] = {}
        self.raise_at_step: dict[int, BaseException] = {}
        self.steps = 0
        self.closed = 0
        self.forget = False

    def add_request(self, request: EngineRequest) -> None:
        if request.request_id in self.fail_at:
            raise self.fail_at[request.request_id]
        self.requests.append(request)
        prompt = "".join(map(chr, request.prompt_token_ids)).lstrip("\x02")
        text, finish = self.answers.get(prompt, ("ok", "stop"))
        ids = [ord(c) for c in text] + ([EOS] if finish == "stop" else [])
        limit = request.params.max_tokens
        assert limit is not None
        if len(ids) > limit:
            ids, finish = ids[:limit], "length"
        if not self.forget:
            self.running[request.request_id] = (request, ids, finish, 0)

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self) -> CoreOutputs:
        self.steps += 1
        if self.steps in self.raise_at_step:
            raise self.raise_at_step.pop(self.steps)
        outputs = []
        for request_id, (request, ids, finish, done) in list(self.running.items()):
            if finish == "error":
                error = ("kv_cache_too_small", "asked", "found", "remedy")
                outputs.append(CoreOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error))
                del self.running[request_id]
                continue
            new = ids[done : done + self.per_step]
            ended = done + len(new) == len(ids)
            outputs.append(news(request_id, new, finish if ended else None))
            self.running[request_id] = (request, ids, finish, done + len(new))
            if ended:
                del self.running[request_id]
        return CoreOutputs(outputs=outputs)

    def has_work(self) -> bool:
        return bool(self.running)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def stats(self) -> StepStats:
        return StepStats(
            step_id=self.steps, num_running=len(self.running), num_waiting=0, num_tokens=0, pages_used=0,
            pages_total=1, prefix_queries=0, prefix_hits=0, num_preemptions=0,
        )  # fmt: skip

    def shutdown(self) -> None:
        self.closed += 1


class Recorder:
    """An observer of requests that writes down what it is told.

    Attributes:
        arrivals: the requests' ids.
        first, later: what came with the first tokens (seconds), and with later ones (seconds, how many).
        ends: (the sequence, why it ended, seconds since its request arrived).
        retries: requests that were sent again.
    """

    def __init__(self) -> None:
        self.arrivals: list[str] = []
        self.first: list[float] = []
        self.later: list[tuple[float, int]] = []
        self.ends: list[tuple[SequenceState, str, float]] = []
        self.retries = 0

    def arrived(self, request: RequestState) -> None:
        self.arrivals.append(request.request_id)

    def stepped(self, stats: StepStats | None) -> None:
        raise AssertionError("a step is told to who drives the core")

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        self.later.append((seconds, count))

    def ended(self, request: RequestState, sequence: SequenceState, reason: str, now: float) -> None:
        self.ends.append((sequence, reason, now - request.arrived))

    def retried(self) -> None:
        self.retries += 1


class Client:
    """What an output processor tells the core."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.sent: list[list[EngineRequest]] = []

    def add(self, requests: list[EngineRequest]) -> None:
        self.sent.append(requests)

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
