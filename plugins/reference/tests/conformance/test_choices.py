"""The reference drivers that decide and propose, through the suites of engine-sdk."""

import json

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import (
    CheckpointConformance,
    DrafterConformance,
    EvictorConformance,
    ExecutorConformance,
    GrammarConformance,
    KVConnectorConformance,
    LogitsProcessorConformance,
    PlatformConformance,
    RouterConformance,
    SchedulingPolicyConformance,
    TokenizerConformance,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


class TestLRU(EvictorConformance):
    driver = "lru"


class TestNgram(DrafterConformance):
    driver = "ngram"


class TestHostConnector(KVConnectorConformance):
    driver = "host"


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


class TestThinkingBudget(LogitsProcessorConformance):
    driver = "thinking_budget"


class TestInline(ExecutorConformance):
    driver = "inline"


@pytest.mark.xdist_group("executors")
class TestProcess(ExecutorConformance):
    driver = "process"
    quick = r"^(?!test_figure|.*\b2\])"  # three workers go every way of two


class TestHost(PlatformConformance):
    driver = "host"


class TestDummy(CheckpointConformance):
    driver, model = "dummy", "dummy:tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model in two shards and four dtypes."""
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    random = torch.Generator().manual_seed(0)
    parts = [{f"{shard}.{dtype}": torch.randn(3, 5, generator=random).to(dtype) for dtype in DTYPES} for shard in "ab"]
    for number, part in enumerate(parts):
        save_file(part, made / f"model-{number}.safetensors")
    return str(made)


class TestSafetensors(CheckpointConformance):
    driver = "safetensors"

    @pytest.fixture(autouse=True)
    def _model(self, folder: str) -> None:
        type(self).model = folder


class TestHF(TokenizerConformance):
    driver = "hf"
