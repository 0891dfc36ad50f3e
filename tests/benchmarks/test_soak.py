"""What a soak would find: its ledger, its requests, and the million requests themselves."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.types.errors import EngineError
from engine.types.outputs import CoreOutput
from engine.types.request import FinishReason
from tests.benchmarks.null_requests import LONGEST_OUTPUT, LONGEST_PROMPT, RequestSource
from tests.benchmarks.soak import Ledger


@pytest.fixture
def begun():
    """A ledger with one open request; the request's id, and how many tokens it asked for."""
    ask = RequestSource(100, seed=1).draw(1)[0]
    ledger = Ledger()
    ledger.begin(ask)
    return ledger, ask.request.request_id, ask.output_len


def news(request_id, tokens, reason=None):
    return [CoreOutput(request_id=request_id, new_token_ids=[7] * tokens, finish_reason=reason)]


def test_a_whole_request_is_counted_once(begun):
    ledger, request_id, asked = begun
    ledger.take(news(request_id, 1) if asked > 1 else [])
    ledger.take(news(request_id, asked - (asked > 1), FinishReason.LENGTH))
    assert ledger.ended[FinishReason.LENGTH] == 1 and ledger.tokens == asked and not ledger.open


@pytest.mark.parametrize("after", [None, FinishReason.LENGTH, FinishReason.ABORT])
def test_nothing_may_come_after_the_end(begun, after):
    ledger, request_id, asked = begun
    ledger.take(news(request_id, asked, FinishReason.LENGTH))
    with pytest.raises(EngineError, match="after its end"):
        ledger.take(news(request_id, 0, after))


@pytest.mark.parametrize(
    ("missing", "reason"),
    [(1, FinishReason.LENGTH), (-1, FinishReason.LENGTH), (0, FinishReason.STOP), (0, FinishReason.ERROR),
     (1, FinishReason.ABORT)],
)  # fmt: skip
def test_a_wrong_end_is_found(begun, missing, reason):
    ledger, request_id, asked = begun
    with pytest.raises(EngineError, match=f"it ended with {reason}"):
        ledger.take(news(request_id, asked - missing, reason))


def test_who_was_aborted_may_end_so(begun):
    ledger, request_id, _ = begun
    assert ledger.abort([request_id, "stranger"]) == [request_id]
    ledger.take(news(request_id, 0, FinishReason.ABORT))
    assert ledger.ended[FinishReason.ABORT] == 1 and ledger.abort([request_id]) == []


def test_requests_are_as_the_source_says():
    asks = RequestSource(1000, seed=3).draw(2000)
    assert [ask.request for ask in asks] == [ask.request for ask in RequestSource(1000, seed=3).draw(2000)]
    assert len({ask.request.request_id for ask in asks}) == 2000
    assert all(ask.request.params.max_tokens == ask.output_len <= LONGEST_OUTPUT for ask in asks)
    assert all(1 <= len(ask.request.prompt_token_ids) <= LONGEST_PROMPT for ask in asks)
    assert max(ask.output_len for ask in asks) > 100
    assert 50 < sum(ask.abort_after is not None for ask in asks) < 200
    first_blocks = [tuple(ask.request.prompt_token_ids[:16]) for ask in asks]
    assert max(first_blocks.count(block) for block in set(first_blocks)) > 100


@pytest.mark.slow
def test_a_million_requests():
    """Each ends once and no page is lost: the bench checks both. Memory stays as it was after the first tenth."""
    command = [sys.executable, "-m", "tests.benchmarks", "soak", "--requests", "1000000", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["ended_length"] + figures["ended_abort"] == 1_000_000
    assert figures["num_preemptions"] > 100 and figures["evicted_pages"] > 1_000_000
    assert figures["rss_mb_end"] <= figures["rss_mb_warm"] * 1.02
    assert figures["rss_mb_most"] <= figures["rss_mb_warm"] * 1.05
    assert figures["blocks_end"] <= figures["blocks_warm"] + 2000
