"""A request as the engine core sees it: token ids, never text."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from engine.types.embeds import PromptEmbeds as PromptEmbeds
from engine.types.params import SamplingParams
from engine.types.pooling import PoolingParams
from engine.types.retention import KVRetention


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the model's weights, for requests that name it: the folder with its files, as workers find it, and a
    revision, which is another where these hold something else."""

    name: str
    path: str
    revision: str

    @property
    def identity(self) -> str:
        """What tells its keys and values apart from others'."""
        return f"{self.name}@{self.revision}"


class EncoderInput(msgspec.Struct, frozen=True, kw_only=True):
    """What the encoder of an encoder-decoder model reads for a request.

    Args:
        key: the same for equal inputs alone: these are encoded once, and requests with others share no pages.
        num_tokens: that the encoder makes of it.
        data: int32 [n], token ids; or float32 [n, features]; see `engine.types.model.EncoderForm`.
    """

    key: str
    num_tokens: int
    data: np.ndarray


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to generate. Made by the frontend, read by the core.

    Args:
        request_id: unique among unfinished requests.
        prompt_token_ids: at least one id, each within the vocabulary.
        params: verified, with `n == 1`, `max_tokens` and `seed` filled in (n > 1 is several requests with a `parent`).
        eos_token_ids: ids that end the sequence unless `ignore_eos`.
        arrival_time: seconds since the epoch, by a clock that is never set back; first come, first served goes by it.
        priority: lower values are more urgent; heeded by scheduling policies that order by it.
        cache_salt: requests with different salts share no cached pages, and no drafter uses for one what it has learned
            from another.
        parent: the id that the n samples of one prompt have in common. The core computes the prompt for the first
            of them and lets the others wait for it, so that they share its pages.
        host_tokens: a logits processor of this request reads its tokens on the host: none is drawn before the one
            before it has come back.
        timeout: seconds that it may take from its arrival in the core, waiting included; None for no limit.
        pooling: the request draws no token: it ends with its prompt, whose hidden states are pooled so. `params` then
            says nothing. Verified, with `task` and `pooling_type` filled in.
        kv_transfer: for connectors that move keys and values between engines: what the client sent as
            `kv_transfer_params`.
        kv_retention: what becomes of its cached pages; several with `tokens` retain several beginnings.
        encoder: of encoder-decoder models alone. embeds: of its first tokens. adapter: that computes it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    parent: str | None = None
    host_tokens: bool = False
    timeout: float | None = None
    pooling: PoolingParams | None = None
    kv_transfer: dict[str, Any] | None = None
    kv_retention: tuple[KVRetention, ...] = ()
    encoder: EncoderInput | None = None
    adapter: Adapter | None = None
    embeds: PromptEmbeds | None = None


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
