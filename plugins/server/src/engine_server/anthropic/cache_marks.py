"""`cache_control`: a mark at a block of the prompt, which asks that the prompt is kept up to its end.

A mark becomes a wish of the request's retention: so many tokens of its beginning, for so many seconds. Where a block
ends in the prompt only the chat template knows. So it renders the conversation once more, as if it ended there, and
what both texts begin with is what is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from engine.types.errors import EngineError
from engine.types.request import Adapter
from engine_server.bodies import Body
from engine_server.conversation.reading import JSONObject
from engine_server.conversation.turn import Conversation, num_given, render
from engine_server.errors import APIError
from engine_server.state import ServerState

MOST_MARKS = 4
"""In one request."""
SECONDS: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
_PROBE = {"role": "user", "content": "?"}


class CacheControl(Body):
    """Keeps the prompt, up to the end of the block at which it stands, before what nobody asks to keep: see
    `engine.types.retention.KVRetention`. A request has at most four. Where the engine retains nothing, it says nothing.

    Args:
        type: the only one.
        ttl: for how long from the end of the request; without it, five minutes.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        """Of its `ttl`."""
        return SECONDS[self.ttl or "5m"]


class Mark(NamedTuple):
    """A mark at a block.

    Args:
        seconds: for which it is kept.
        messages: those up to the block, the last one perhaps in part; None: all, and the beginning of the answer.
        num_tools: of the tools, how many stand up to the block; None: all.
    """

    seconds: float
    messages: Sequence[Mapping[str, Any]] | None
    num_tools: int | None = None


def take_mark(block: JSONObject) -> float | None:
    """The seconds of the block's mark; None where it has none. Raises a 400 APIError for one that is none."""
    if (value := block.take("cache_control")) is None:
        return None
    mark = JSONObject(value, f"{block.where}.cache_control")
    mark.one_of("type", ("ephemeral",))
    ttl = "5m" if mark.left.get("ttl") is None else mark.one_of("ttl", tuple(SECONDS))
    mark.end()
    return SECONDS[ttl]


def check_number(marks: Sequence[Mark]) -> None:
    """Raise a 400 APIError for more than there may be."""
    if len(marks) > MOST_MARKS:
        found = f"cache_control: more than {MOST_MARKS} are in this request; send fewer, each keeps all before it"
        raise APIError(400, found, param="cache_control")


@dataclass(frozen=True)
class Kept:
    """What a request's marks ask for.

    Args:
        wishes: as a prompt's `kv_retention`.
        hourly: tokens of the longest beginning that is kept for an hour.
        longest: of the longest at all.
    """

    wishes: tuple[dict[str, Any], ...] = ()
    hourly: int = 0
    longest: int = 0

    def usage(self, state: ServerState, num_tokens: int, num_cached: int) -> dict[str, Any]:
        """Of a prompt's tokens, of which so many were found: which are kept from now on, which were, and the others."""
        hourly, longest = (min(one, num_tokens, _most_kept(state)) for one in (self.hourly, self.longest))
        created, of_an_hour = max(0, longest - num_cached), max(0, hourly - num_cached)
        split = {"ephemeral_5m_input_tokens": created - of_an_hour, "ephemeral_1h_input_tokens": of_an_hour}
        return {
            "input_tokens": num_tokens - num_cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": num_cached,
            "cache_creation": split,
        }


async def find(state: ServerState, said: Conversation, marks: Sequence[Mark], prompt: str) -> Kept:
    """What marks in a conversation, which this prompt was rendered from, ask for."""
    if not marks:
        return Kept()
    ends = [len(prompt) if mark.messages is None else await _end(state, said, mark, prompt) for mark in marks]
    tokens = await _count(state, prompt, ends, state.adapters.get(said.model), num_given(state, said))
    wishes: list[dict[str, Any]] = [
        {"ttl": mark.seconds, "tokens": count, "hint": True} for mark, count in zip(marks, tokens, strict=True) if count
    ]
    hourly = [wish["tokens"] for wish in wishes if wish["ttl"] == SECONDS["1h"]]
    return Kept(tuple(wishes), max(hourly, default=0), max((wish["tokens"] for wish in wishes), default=0))


async def _end(state: ServerState, said: Conversation, mark: Mark, prompt: str) -> int:
    """Where the mark's block ends in the prompt, in characters. 0 where the template renders no such conversation, or
    writes it otherwise than the whole."""
    assert mark.messages is not None
    tools = said.tools if mark.num_tools is None else replace(said.tools, given=said.tools.given[: mark.num_tools])
    begun = replace(said, tools=tools, prefill="", add_generation_prompt=False, messages=mark.messages)
    for several in (begun, replace(begun, messages=[*mark.messages, _PROBE])):
        try:
            text = (await render(state, several))["prompt"]
        except EngineError:  # a template may want a message of the user
            continue
        return _common(text, prompt)
    return 0


def _common(one: str, other: str) -> int:
    """With how many characters both begin."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same


async def _count(
    state: ServerState, prompt: str, ends: Sequence[int], adapter: Adapter | None, given: int
) -> list[int]:
    """How many tokens stand before each of these places, in whole blocks: others are not kept. given: stand before the
    text."""
    counted, total, begin = {0: 0}, given, 0
    for end in sorted(set(ends) - {0}):
        piece = prompt[begin:end]
        total += len(
            await state.engine.long.run(partial(state.engine.inputs.tokenize, piece, False, adapter), len(piece))
        )
        counted[end], begin = total, end
    size = state.engine.plan.start.worker.layout.block_size
    return [counted[end] // size * size for end in ends]


def _most_kept(state: ServerState) -> int:
    """Tokens that one request can have kept: what its key may, and nothing where the engine retains nothing."""
    engine, stats = state.engine, state.engine.last_stats
    if stats is None or not stats.retention_events or engine.worker is None:
        return 0
    start = engine.plan.start
    share = min(start.max_kv_retention, start.max_kv_retention_per_key)
    pages = int(share * (engine.worker.num_pages - 1)) // max(1, len(start.worker.layout.tables))
    return pages * start.worker.layout.block_size
