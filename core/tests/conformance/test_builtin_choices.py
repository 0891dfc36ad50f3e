"""The reference drivers that decide and propose, through the suites of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import (
    DrafterConformance,
    EvictorConformance,
    ExecutorConformance,
    GrammarConformance,
    LogitsProcessorConformance,
    RouterConformance,
    SchedulingPolicyConformance,
)


class TestLRU(EvictorConformance):
    driver = "lru"


class TestNgram(DrafterConformance):
    driver = "ngram"


class TestFCFS(SchedulingPolicyConformance):
    driver = "fcfs"


class TestPriority(SchedulingPolicyConformance):
    driver = "priority"


class TestAgeingPriority(SchedulingPolicyConformance):
    driver, options = "priority", {"aging_seconds": 2.0}


class TestLeastLoaded(RouterConformance):
    driver = "least_loaded"


class TestPrefixAware(RouterConformance):
    driver = "prefix_aware"


class TestChoice(GrammarConformance):
    driver = "choice"


class TestAllowedTokenIds(LogitsProcessorConformance):
    driver = "allowed_token_ids"


class TestBadWords(LogitsProcessorConformance):
    driver = "bad_words"


class TestLogitBias(LogitsProcessorConformance):
    driver = "logit_bias"


class TestInline(ExecutorConformance):
    driver = "inline"


@pytest.mark.xdist_group("executors")
class TestProcess(ExecutorConformance):
    driver = "process"
