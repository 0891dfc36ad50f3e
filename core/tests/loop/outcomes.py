"""What a request must have got from a core around a `PagedWorker`."""

from __future__ import annotations

from paged_worker import alone, logprob_entry
from schedules import Outcome, Planned

from engine.loop.engine_core import EngineCore


def check_outcome(core: EngineCore, request: Planned, outcome: Outcome) -> None:
    """The request got what it gets alone, as far as it came."""
    kv = core.scheduler.kv
    tokens, reason = alone(
        kv.layout,
        list(request.prompt),
        request.params,
        list(request.eos),
        core.scheduler.max_model_len,
        request.encoder,
    )
    if outcome.finish_reason == "abort":
        assert request.aborted is not None
        assert outcome.tokens == tokens[: len(outcome.tokens)]
    elif outcome.finish_reason == "error" and outcome.error is not None and outcome.error[0] == "request_timeout":
        assert request.timeout is not None
        assert outcome.tokens == tokens[: len(outcome.tokens)]
    elif outcome.finish_reason == "error":
        assert outcome.error is not None and outcome.error[0] == "kv_cache_too_small"
        assert outcome.tokens == tokens[: len(outcome.tokens)]
        assert not kv.fits_at_all(len(request.prompt) + len(tokens) - 1), "it would have fitted"
    else:
        assert (outcome.tokens, outcome.finish_reason) == (tokens, "stop" if reason == "complete" else reason)
        assert outcome.completed == (reason == "complete")
        if reason == "stop":
            last = None if tokens[-1] in request.eos and not request.params.ignore_eos else tokens[-1]
            assert outcome.stop_reason == last
    k = request.params.logprobs
    if k is None:
        assert not outcome.logprobs
    else:
        found = [(e.chosen, e.rank, e.top_ids, e.top_values) for e in outcome.logprobs]
        assert found == [logprob_entry(token, k) for token in outcome.tokens]
