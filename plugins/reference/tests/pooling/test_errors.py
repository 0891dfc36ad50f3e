"""What is refused, and what the message says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pooling_models import prompts

from engine import LLM, AsyncLLM, EngineArgs, PoolingParams, SamplingParams
from engine.errors import CheckpointError, ConfigError, InvalidRequestError, PromptTooLongError, UnsupportedModelError


@pytest.fixture(scope="module")
def encoder(checkpoints):
    with LLM(checkpoints("BertModel"), max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def classifier(checkpoints):
    with LLM(checkpoints("BertForSequenceClassification", num_labels=3), max_num_seqs=4) as llm:
        yield llm


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"task": "sing"}, "task='sing'; there is no such one; use 'embed', 'token_embed', 'classify'"),
        ({"pooling_type": "max"}, "pooling_type='max'; there is no such one; use 'last', 'cls', 'mean'"),
        ({"normalize": 1}, "normalize=1; it is not a boolean"),
        ({"dimensions": 0}, "dimensions=0; it is outside 1.."),
        ({"dimensions": True}, "dimensions=True; it is not an integer"),
        ({"dimensions": 49}, "dimensions=49; this model's vectors have 48 elements; ask for 48 or fewer"),
        ({"task": "token_embed", "pooling_type": "mean"}, "pooling_type='mean' with task='token_embed'"),
        ({"use_activation": True}, "use_activation=True with task='embed'; embeddings have no activation"),
        ({"task": "classify"}, "classify with BertModel; it has no classification head; ask for embed or token_embed"),
    ],
    ids=str,
)
def test_parameters(encoder: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encoder.encode("hello", PoolingParams(**params), use_tqdm=False)
    assert message in str(caught.value)


def test_calls_that_the_model_does_not_serve(encoder: LLM, classifier: LLM) -> None:
    for call, message in (
        (lambda: encoder.classify("x"), "classify with BertModel; it has no classification head"),
        (lambda: classifier.embed("x"), "embed with BertForSequenceClassification; it has a classification head"),
        (lambda: classifier.encode("x", pooling_task="token_embed"), "it has a classification head; ask for classify"),
        (lambda: classifier.score("x", "y"), "its classification head has 3 labels, a score is one number"),
        (lambda: encoder.generate("x"), "generate with BertModel; this engine was started to pool"),
        (lambda: classifier.generate("x"), "it gives vectors or labels, no text; ask for classify"),
        (lambda: encoder.embed("x", PoolingParams(task="token_embed")), "embed with task='token_embed'"),
        (lambda: encoder.embed("x", SamplingParams()), "these are no pooling params"),
        (lambda: encoder.embed(["x", "y"], [PoolingParams()]), "2 prompts with 1 pooling params"),
        (lambda: classifier.classify("x", PoolingParams(dimensions=3)), "dimensions=3 with task='classify'"),
        (lambda: classifier.encode("x", PoolingParams(normalize=True)), "normalize=True with task='classify'"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert message in str(caught.value)
    assert len(encoder.embed("it goes on", use_tqdm=False)) == 1


def test_scores_of_lists_that_do_not_match(encoder: LLM, checkpoints) -> None:
    for first, second in ((["a", "b"], ["c"]), (["a", "b"], ["c", "d", "e"]), ([], ["a"]), (["a"], [])):
        with pytest.raises(InvalidRequestError, match="they cannot be paired"):
            encoder.score(first, second, use_tqdm=False)
    with LLM(checkpoints("BertForSequenceClassification", num_labels=1), max_num_seqs=4) as llm:
        with pytest.raises(InvalidRequestError, match="score a list; a pair that is read as one prompt is two texts"):
            llm.score([[5, 6]], ["a"], use_tqdm=False)
        with pytest.raises(PromptTooLongError, match="a prompt of 67 tokens; the longest has 64 tokens"):
            llm.score("a" * 32, "b" * 32, use_tqdm=False)


def test_long_prompts(encoder: LLM) -> None:
    """All positions may be prompt: no token is to be generated."""
    at_limit, beyond = prompts((64, 65))
    assert len(encoder.embed([at_limit], use_tqdm=False)) == 1
    with pytest.raises(PromptTooLongError, match="a prompt of 65 tokens; the longest has 64 tokens"):
        encoder.embed([at_limit, beyond], use_tqdm=False)


def test_a_generating_engine_does_not_pool(checkpoints) -> None:
    with LLM(checkpoints("LlamaForCausalLM"), num_kv_pages=20, max_num_seqs=2) as llm:
        for call in (llm.embed, llm.classify, llm.encode, lambda text: llm.score(text, text)):
            with pytest.raises(InvalidRequestError, match='start it with runner="pooling"'):
                call("hello")
        assert llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("BertModel", {"runner": "generate"}, "runner=generate with BertModel; it has no logits over the vocabulary"),
        ("BertModel", {"max_num_batched_tokens": 63}, "a prompt of up to 64 tokens is one step's"),
        ("BertModel", {"long_prefill_token_threshold": 8}, "long_prefill_token_threshold=8 with BertModel"),
        ("LlamaForCausalLM", {"runner": "pooling", "drafter": "ngram"}, "drafter=ngram with an engine that pools"),
        ("BertModel", {"attention": "full=torch"}, "encoder"),
    ],
    ids=str,
)
def test_settings(checkpoints, architecture: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(checkpoints(architecture), **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu' is none of gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not 'absolute'"),
        ({"is_decoder": True}, "the config sets is_decoder"),
        ({"num_attention_heads": 5}, "hidden_size"),
        ({"matryoshka_dimensions": "many"}, "matryoshka_dimensions"),
    ],
    ids=str,
)
def test_configs(checkpoints, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedModelError, CheckpointError)) as caught:
        LLM(changed(checkpoints("BertModel"), tmp_path, changes))
    assert message in str(caught.value)


def test_listed_dimensions(checkpoints, tmp_path: Path) -> None:
    folder = changed(checkpoints("BertModel"), tmp_path, {"matryoshka_dimensions": [8, 16]})
    with LLM(folder, max_num_seqs=2) as llm:
        for size in (8, 16, 48):
            found = llm.embed("x", PoolingParams(dimensions=size), use_tqdm=False)[0].outputs
            assert found.hidden_size == size
        with pytest.raises(InvalidRequestError, match="dimensions=9; this model was trained for 8, 16"):
            llm.embed("x", PoolingParams(dimensions=9), use_tqdm=False)


def changed(source: Path, tmp_path: Path, changes: dict[str, Any]) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


async def test_coroutines(checkpoints) -> None:
    """The core in its own process: results travel, errors come at once, a cancelled request is forgotten."""
    import asyncio

    llm = AsyncLLM(EngineArgs(model=str(checkpoints("BertModel")), max_num_seqs=4, dtype="float64"))
    try:
        await llm.start()
        given = prompts((9, 30, 64))
        found = await asyncio.gather(
            *(llm.encode(ids) for ids in given), llm.encode(given[1], PoolingParams(task="token_embed"))
        )
        with LLM(checkpoints("BertModel"), dtype="float64") as plain:
            expected = plain.encode(given, use_tqdm=False)
        for one, other in zip(found, expected, strict=False):
            assert one.outputs.data.tolist() == pytest.approx(other.outputs.data.tolist(), abs=1e-12)
        assert found[3].outputs.data.shape == (30, 48)
        with pytest.raises(InvalidRequestError, match="dimensions=99"):
            await llm.encode("x", PoolingParams(dimensions=99))
        with pytest.raises(InvalidRequestError, match="generate with BertModel"):
            await anext(aiter(llm.generate("x", SamplingParams())))
        assert llm.num_unfinished == 0
        assert await llm.call("check_integrity") is None
    finally:
        llm.shutdown()
