"""What comes back: from the core to the frontend in token ids, from the frontend to the user in text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.types.errors import EngineError
from engine.types.request import FinishReason


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities at one output position.

    Args:
        chosen: of the token that was drawn.
        rank: of that token; 1 is the most likely.
        top_ids, top_values: the most likely tokens, best first; as many as the request asked for.
    """

    chosen: float
    rank: int
    top_ids: list[int]
    top_values: list[float]


class CoreOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of one request after one step. Many are made in every step, so the garbage collector passes them over: they
    are part of no cycle.

    Args:
        new_token_ids: tokens accepted in this step, in order; may be empty when the request ends.
        new_logprobs: one entry a token; None where none were asked for.
        new_prompt_logprobs: of the next prompt tokens, in order, the first prompt token left out. They come in pieces,
            at the latest with the first token; None where there is no piece.
        finish_reason: None while it runs.
        stop_reason: the stop token id that ended it, where one did (None for end of sequence).
        num_cached_tokens: prompt tokens that were found in the prefix cache; sent with the first token.
        queue_time: seconds from its arrival in the core to its first admission; sent with the first token.
        prefill_time: seconds from there to the first token; sent with it.
        error: (code, asked, found, remedy) of a typed error where `finish_reason` is "error".
        completed: it ended ("stop") because its constraint was complete: the last token belongs to the text.
        kv_transfer: when it ended, what a connector has to say to who sent it: `kv_transfer_params`.
        pooled: of a request that pools: its result, [size]; or the vectors of its next prompt tokens, [n, size].
    """

    request_id: str
    new_token_ids: list[int] = msgspec.field(default_factory=list)
    new_logprobs: list[TokenLogprobs] | None = None
    new_prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    queue_time: float = 0.0
    prefill_time: float = 0.0
    error: tuple[str, str, str, str] | None = None
    completed: bool = False
    kv_transfer: dict[str, Any] | None = None
    pooled: np.ndarray | None = None


class StepStats(msgspec.Struct, kw_only=True):
    """The state of the core after one step, for hooks, logs and metrics.

    Args:
        step_id: of the step whose results were taken in.
        num_running, num_waiting: requests.
        num_tokens: computed in this step (prompt and output).
        pages_used, pages_total: of the KV cache; a page that only the prefix cache holds is not used.
        prefix_queries, prefix_hits, reused_tokens: of prompts: looked up, found, behind that reused, since start.
        num_preemptions, generation_tokens (accepted ones): since start.
        prompt_tokens: of requests that got their first token, since start; cached ones count.
        num_swapped: requests among those waiting whose pages the swap tier keeps.
        num_swap_preemptions: of `num_preemptions`, those by mode "swap"; num_swap_full: those that should have been,
            and were computed again because the swap tier was full.
        swap_pages_used, swap_pages_total: of the swap tier.
        num_drafts, num_accepted_drafts: tokens that the drafter proposed and steps computed, and those of them that
            became output, since start.
        num_draft_rows: rows of steps that were to have drafts, since start.
        accepted_drafts_at: of the accepted ones, how many at each place behind their row's token; () without a drafter.
        num_jump_tokens, num_accepted_jump_tokens: tokens that constraints forced and steps computed ahead, and those of
            them that became output, since start. They are no drafts.
        kv_connectors: (connector, event, count) since start: "loaded_tokens", "hit_tokens" (of `prefix_queries`, those
            that it had), "failed_pages", "expired_holds", its own.
        retained_pages: (priority, pages that requests retain by it), "pinned" the last.
        retention_events: (event, pages) since start: "expired"; "given_up", for want of others; "displaced" by a bound.
        hook_failures: (plugin, hook, how often it raised) of the hooks of this core, since start.
    """

    step_id: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    reused_tokens: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_draft_rows: int = 0
    accepted_drafts_at: tuple[int, ...] = ()
    num_jump_tokens: int = 0
    num_accepted_jump_tokens: int = 0
    num_swapped: int = 0
    num_swap_preemptions: int = 0
    num_swap_full: int = 0
    swap_pages_used: int = 0
    swap_pages_total: int = 0
    kv_connectors: tuple[tuple[str, str, int], ...] = ()
    retained_pages: tuple[tuple[str, int], ...] = ()
    retention_events: tuple[tuple[str, int], ...] = ()
    hook_failures: tuple[tuple[str, str, int], ...] = ()


class CoreOutputs(msgspec.Struct, kw_only=True, tag="outputs", omit_defaults=True):
    """What one step sends to the frontend.

    Args:
        outputs: of this client's requests.
        stats: of the whole core.
        others: requests of other clients that have not ended.
    """

    outputs: list[CoreOutput]
    stats: StepStats | None = None
    others: int = 0


class Logprob(NamedTuple):
    """One candidate at one position.

    Args:
        logprob: natural logarithm of its probability, before temperature and filters.
        rank: 1 is the most likely; None where it was not computed.
        decoded_token: its text alone.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One completion of one prompt, as far as it has come.

    Args:
        index: 0 .. n-1.
        text: all text so far; never ends in half a UTF-8 character, and never shows a part of a stop string.
        token_ids: all ids so far.
        logprobs: for each position a dict from token id to `Logprob`, the drawn token among them; None if not asked.
        cumulative_logprob: sum over the drawn tokens; None if not asked.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for end of sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """True once there is a finish reason."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions.

    Args:
        request_id: as given to `add_request`.
        prompt: the text, None where token ids were given.
        prompt_token_ids: the ids.
        outputs: one `CompletionOutput` for each of n; where `best_of` chose them, best first.
        finished: all completions have ended.
        num_cached_tokens: prompt tokens found in the prefix cache.
        error: why completions ended with "error"; None where none did.
        prompt_logprobs: for each prompt token a dict from token id to `Logprob`, its own id among them; None for the
            first, which nothing precedes. None as a whole where they were not asked for, or are not complete yet.
        num_discarded_tokens: of completions that were computed and that `best_of` left out.
        pooled: of a request with PoolingParams: [size], or [tokens, size] for single tokens, once it has finished.
        kv_transfer: for whoever goes on with it elsewhere, see `TextPrompt`; once it has finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    error: EngineError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_discarded_tokens: int = 0
    pooled: np.ndarray | None = None
    kv_transfer: dict[str, Any] | None = None

    @property
    def data(self) -> np.ndarray:
        """What was pooled; of a request that pools and has ended well."""
        assert self.pooled is not None, "a request that pools ends with what was pooled, or with an error"
        return self.pooled
