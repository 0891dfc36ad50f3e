"""What hooks are told: plain data, which may be kept, or sent elsewhere with msgspec."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.types.outputs import StepStats
from engine.types.params import SamplingParams
from engine.types.pooling import PoolingParams

OutputFilter = Callable[[str, bool], str]
"""What `output_filter` gives: (new text, is it the last) -> the text to show."""


class HTTPOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """What HTTP knows of a request.

    Args:
        method, path: e.g. "POST", "/v1/chat/completions".
        headers: by name in lower case. Those that carry secrets (authorization, cookies, keys, tokens) are left out.
        client: the address that the connection comes from, perhaps a proxy's; "" where unknown.
    """

    method: str
    path: str
    headers: dict[str, str] = {}
    client: str = ""


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A request as hooks of the frontend see it, before it is tokenised and afterwards.

    Args:
        request_id: the user's, or the one made for it.
        params: as given and verified; they belong to the user: read them, do not change them.
        priority: as given; lower values are more urgent.
        http: what HTTP knows of it; None where it did not come over HTTP.
    """

    request_id: str
    params: SamplingParams | PoolingParams
    priority: int = 0
    http: HTTPOrigin | None = None


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that has ended, one of a request's n. Durations are seconds.

    Args:
        request_id: the user's; `index`: which of its sequences.
        model: the model's name in the API.
        arrival_time: seconds since the epoch.
        queue_seconds: from arrival in the engine core to admission; None where it got no token.
        prefill_seconds: from admission to the first token; None where it got no token. Both as the core measured them.
        first_token_seconds: from arrival until the first token was back in the frontend; None where it got none.
        decode_seconds: from the first token to the last, as they came back to the frontend; 0 where there were none.
        total_seconds: from arrival to the end.
        prompt_tokens: of the prompt; `cached_tokens`: of these, found in the prefix cache.
        output_tokens: that the sequence holds.
        finish_reason: "stop", "length", "abort" or "error".
        error_code: of the error that ended it, e.g. "request_timeout"; "" where none did.
        http: what HTTP knows of the request; None where it did not come over HTTP.
    """

    request_id: str
    index: int
    model: str
    arrival_time: float
    queue_seconds: float | None
    prefill_seconds: float | None
    first_token_seconds: float | None
    decode_seconds: float
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    error_code: str = ""
    http: HTTPOrigin | None = None


class ChosenDriver(msgspec.Struct, frozen=True, kw_only=True):
    """A driver at work.

    Args:
        point: e.g. "attention".
        kinds: of layers or operations that it serves, where its point has several drivers at work; else empty.
        driver: its name; `distribution`, `version`: what it came with.
        why: why it was chosen, e.g. "asked for", or "auto, priority 10; unfit: triton: there is no GPU".
    """

    point: str
    driver: str
    distribution: str
    version: str
    why: str
    kinds: tuple[str, ...] = ()


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that stands.

    Args:
        model: its name in the API; `architecture`: the string of its config.json.
        dtype: of weights and activations; `device`: e.g. "cpu".
        max_model_len: most tokens of one request; `max_num_seqs`: most requests that run at once, on each rank.
        num_ranks: engine cores.
        drivers: those at work, as the banner lists them; none where no package tells them.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int
    num_ranks: int
    drivers: tuple[ChosenDriver, ...] = ()


class IntervalStats(StepStats, kw_only=True):
    """How an engine did in the last interval: the core's state at its end, where the counts that `OF_INTERVAL` names
    are those of the interval, all others since the start. Requests that the core has not told of yet count as waiting.

    Args:
        seconds: the interval's length.
    """

    seconds: float


OF_INTERVAL = (
    *("prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "reused_tokens"),
    *("num_drafts", "num_accepted_drafts", "num_draft_rows", "num_jump_tokens", "num_accepted_jump_tokens"),
)
