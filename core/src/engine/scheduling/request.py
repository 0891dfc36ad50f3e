"""One request inside the core."""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

import numpy as np

from engine.kv.hashing import MediaSpan
from engine.kv.tails import Sequence
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest

if TYPE_CHECKING:
    from engine.interfaces.grammar import Matcher
    from engine.scheduling.slots import SlotTable


class Status(enum.Enum):
    """Where a request is.

    COMPILING  waits for the matcher of its constraint
    HELD       waits for a sibling to compute the prompt that they share
    WAITING    in the policy's queue
    RUNNING    in a slot, planned step by step
    DRAINING   preempted: its pages are given back, its slot keeps the tokens that steps under way still return
    SWAPPED    preempted, and the swap tier keeps what its pages held
    FINISHED   ended; nobody looks at it again
    """

    COMPILING = enum.auto()
    HELD = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """What the scheduler keeps of a request beside its slot's arrays.

    Args:
        request: as it came.
        limit: the most tokens, prompt and output: the smaller of `max_tokens` and the model's length; where the request
            pools, those of its prompt.
        root: hash that stands before its first block.

    Attributes:
        token_ids: int32 [n]; all tokens known when it last was without a slot. In a slot, the slot's arrays hold them.
        slot: -1 where it has none.
        hashes: of its full blocks, as far as they were needed.
        lora_id, media: see `engine.kv.hashing.Hashed`; no request has any yet.
        num_cached_tokens: of the prompt, when it was first admitted; -1 before.
        queued_at, admitted_at: seconds of `time.monotonic()`: when it came, when it was first admitted.
        num_prompt_scored: prompt tokens whose log probabilities were sent, the first not counted.
        timeout, cache_salt, encoder: see `EngineRequest`.
        matcher: its place in its constraint, behind the tokens that were accepted; None where it has no constraint.
        pooling: for a request that draws nothing and ends with its prompt; None for one that generates.
        num_pooled: prompt tokens whose own vectors were sent.
    """

    __slots__ = (
        "admitted_at",
        "arrival_time",
        "cache_salt",
        "encoder",
        "eos_token_ids",
        "hashes",
        "host_tokens",
        "limit",
        "lora_id",
        "matcher",
        "media",
        "num_cached_tokens",
        "num_pooled",
        "num_prompt_scored",
        "num_prompt_tokens",
        "params",
        "parent",
        "pooling",
        "priority",
        "queued_at",
        "request_id",
        "root",
        "slot",
        "status",
        "stop_token_ids",
        "table",
        "timeout",
        "token_ids",
    )

    def __init__(self, request: EngineRequest, table: SlotTable, limit: int, root: bytes) -> None:
        self.request_id = request.request_id
        self.arrival_time = request.arrival_time
        self.priority = request.priority
        self.params: SamplingParams = request.params
        self.parent = request.parent
        self.host_tokens = request.host_tokens
        self.timeout = request.timeout
        self.cache_salt = request.cache_salt
        self.encoder = request.encoder
        self.token_ids = np.array(request.prompt_token_ids, np.int32)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.eos_token_ids = frozenset() if request.params.ignore_eos else frozenset(request.eos_token_ids)
        # In the order of their ids, so that equal requests make equal plans.
        self.stop_token_ids = np.array(sorted(self.eos_token_ids.union(request.params.stop_token_ids)), np.int32)
        self.limit = limit
        self.root = root
        self.lora_id: str | None = None
        self.media: tuple[MediaSpan, ...] = ()
        self.table = table
        self.status = Status.HELD
        self.slot = -1
        self.hashes: list[bytes] = []
        self.num_cached_tokens = -1
        self.queued_at = self.admitted_at = time.monotonic()
        self.num_prompt_scored = 0
        self.matcher: Matcher | None = None
        self.pooling = request.pooling
        self.num_pooled = 0

    @property
    def num_tokens(self) -> int:
        """Known so far, prompt and output."""
        return int(self.table.known[self.slot]) if self.slot >= 0 else self.token_ids.size

    def sequence(self, tokens: np.ndarray) -> Sequence:
        """What the KV manager reads of it: its first tokens, int32 [n]."""
        return Sequence(self.hashes, self.root, tokens, self.media, self.lora_id, self.encoder)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, slot={self.slot}, num_tokens={self.num_tokens})"
