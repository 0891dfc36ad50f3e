"""Decoders that embed and classify, against transformers: every architecture, every way of pooling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pooling_models import DECODERS, Oracle, pooled, prompts, unit
from safetensors.torch import load_file, save_file

from engine import LLM, PoolingParams

LENGTHS = (23, 1, 40, 5, 70, 16)
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def open_llm(folder: Path, dtype: str = "float32", **settings: object) -> LLM:
    return LLM(
        folder, dtype=dtype, **{"num_kv_pages": 100, "max_num_seqs": 4, "max_num_batched_tokens": 24, **settings}
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", DECODERS)
def test_embeddings(checkpoints, family: str, dtype: str) -> None:
    """Pooled by the last token, as a bare decoder is; prompts in chunks, batched, two steps in flight."""
    folder = checkpoints(f"{family}Model")
    oracle, given = Oracle(folder, getattr(torch, dtype)), prompts(LENGTHS)
    with open_llm(folder, dtype) as llm:
        found = llm.embed(given, use_tqdm=False)
    for ids, output in zip(given, found, strict=True):
        assert output.prompt_token_ids == ids and output.finished
        expected = unit(oracle.states(ids)[-1])
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=TOLERANCE[dtype])


def test_sliding_layers(checkpoints) -> None:
    folder = checkpoints("MistralModel", sliding=7)
    oracle, given = Oracle(folder, torch.float64), prompts(LENGTHS)
    with open_llm(folder, "float64") as llm:
        found = llm.encode(given, PoolingParams(pooling_type="mean", normalize=False), use_tqdm=False)
    for ids, output in zip(given, found, strict=True):
        np.testing.assert_allclose(output.outputs.data, oracle.states(ids).mean(axis=0), atol=1e-12)


@pytest.mark.parametrize("kind", ["last", "cls", "mean", None])
@pytest.mark.parametrize("dimensions", [None, 5])
@pytest.mark.parametrize("normalize", [True, False, None])
def test_what_a_request_may_choose(
    checkpoints, kind: str | None, dimensions: int | None, normalize: bool | None
) -> None:
    """Elements are cut before the vector is scaled. The model's own choice is its last token, scaled."""
    folder = checkpoints("LlamaModel")
    oracle, given = Oracle(folder, torch.float64), prompts(LENGTHS[:4])
    params = PoolingParams(pooling_type=kind, dimensions=dimensions, normalize=normalize)
    with open_llm(folder, "float64") as llm:
        found = llm.encode(given, params, use_tqdm=False)
    for ids, output in zip(given, found, strict=True):
        expected = pooled(oracle.states(ids), kind or "last")[:dimensions]
        expected = expected if normalize is False else unit(expected)
        assert output.outputs.data.dtype == np.float64 and output.outputs.data.shape == expected.shape
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-12)


def test_wishes_may_differ_within_a_batch(checkpoints) -> None:
    folder = checkpoints("Qwen3Model")
    oracle, given = Oracle(folder, torch.float64), prompts((9, 30, 12, 9, 4, 20))
    wishes = [
        PoolingParams(pooling_type="mean", normalize=False),
        PoolingParams(task="token_embed", normalize=False),
        PoolingParams(pooling_type="cls", dimensions=3),
        PoolingParams(task="token_embed", dimensions=7),
        PoolingParams(),
        PoolingParams(task="embed", pooling_type="mean", dimensions=2, normalize=True),
    ]
    with open_llm(folder, "float64", max_num_seqs=6) as llm:
        found = [output.outputs.data for output in llm.encode(given, wishes, use_tqdm=False)]
    states = [oracle.states(ids) for ids in given]
    expected = [
        states[0].mean(axis=0),
        states[1],
        unit(states[2][0, :3]),
        unit(states[3][:, :7]),
        unit(states[4][-1]),
        unit(states[5].mean(axis=0)[:2]),
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_float32_at_least(checkpoints, dtype: str) -> None:
    """The mean of bfloat16 states is not summed in bfloat16: it is within bfloat16's error of float64's."""
    folder = checkpoints("LlamaModel")
    ids = prompts((200,))
    with open_llm(folder, dtype) as llm:
        data = llm.encode(ids, PoolingParams(pooling_type="mean", normalize=False), use_tqdm=False)[0].outputs.data
        states = llm.encode(ids, PoolingParams(task="token_embed", normalize=False), use_tqdm=False)[0].outputs.data
    assert data.dtype == states.dtype == np.float32
    np.testing.assert_allclose(data, states.astype(np.float64).mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("form", ["as it generates", "without prefix and head", "with sentence-transformers' files"])
def test_a_generating_architecture_embeds(checkpoints, tmp_path: Path, form: str) -> None:
    """...ForCausalLM by request, or because the files beside it say so; its tensors in either of the two forms."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("Qwen3ForCausalLM"), folder)
    settings = {} if form.startswith("with sentence") else {"runner": "pooling"}
    if form == "without prefix and head":
        tensors = load_file(folder / "model.safetensors")
        tensors = {n.removeprefix("model."): t.clone() for n, t in tensors.items() if not n.startswith("lm_head")}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if not settings:
        (folder / "modules.json").write_text(
            json.dumps([{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}])
        )
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    oracle, given = Oracle(folder, torch.float64, "Qwen3Model"), prompts(LENGTHS[:3])
    with open_llm(folder, "float64", **settings) as llm:
        found = llm.embed(given, use_tqdm=False)
    for ids, output in zip(given, found, strict=True):
        state = oracle.states(ids)[-1]
        expected = unit(state) if settings else state  # their chain has no Normalize
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("features", "activation"),
    [
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 2, "problem_type": "regression"}, "none"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", DECODERS)
def test_labels(checkpoints, family: str, features: dict[str, object], activation: str) -> None:
    """The head on the last token; the activation as the config says, and the bare logits on demand."""
    folder = checkpoints(f"{family}ForSequenceClassification", **features)
    oracle, given = Oracle(folder, torch.float64), prompts(LENGTHS)
    with open_llm(folder, "float64") as llm:
        probs = [output.outputs.probs for output in llm.classify(given, use_tqdm=False)]
        bare = llm.classify(given, PoolingParams(use_activation=False), use_tqdm=False)
    for ids, found, logits in zip(given, probs, bare, strict=True):
        expected = torch.from_numpy(oracle.logits(ids))
        np.testing.assert_allclose(logits.outputs.probs, expected, atol=1e-12)
        assert logits.outputs.num_classes == features["num_labels"]
        if activation == "softmax":
            expected = expected.softmax(-1)
        elif activation == "sigmoid":
            expected = expected.sigmoid()
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_scores_of_embeddings_are_cosines(checkpoints) -> None:
    """One against several, and each against its own; also where the vectors are not scaled."""
    folder = checkpoints("LlamaModel")
    oracle = Oracle(folder, torch.float64)
    first, second = prompts((5, 8, 13)), prompts((6, 11, 3), seed=1)
    a, b = (np.stack([unit(oracle.states(ids)[-1]) for ids in given]) for given in (first, second))
    with open_llm(folder, "float64") as llm:
        several = llm.score(first, second, use_tqdm=False)
        one = llm.score(first[0], second, PoolingParams(normalize=False), use_tqdm=False)
        single = llm.score(first[:1], second[:1], use_tqdm=False)
    np.testing.assert_allclose([o.outputs.score for o in several], (a * b).sum(axis=1), atol=1e-12)
    np.testing.assert_allclose([o.outputs.score for o in one], b @ a[0], atol=1e-12)
    assert [o.outputs.score for o in single] == pytest.approx([float(a[0] @ b[0])], abs=1e-12)
    assert several[1].prompt_token_ids == first[1] + second[1]


def test_a_cross_encoder_reads_both_texts(checkpoints) -> None:
    """A decoder's tokenizer puts one text behind the other; the score is the head's."""
    folder = checkpoints("Qwen3ForSequenceClassification", num_labels=1)
    oracle = Oracle(folder, torch.float64)
    with open_llm(folder, "float64") as llm:
        found = llm.score("what is it?", ["a cat", "the rain in Spain"], use_tqdm=False)
        tokenizer = llm.get_tokenizer()
        for text, output in zip(("a cat", "the rain in Spain"), found, strict=True):
            ids = tokenizer.encode("what is it?") + tokenizer.encode(text)
            assert output.prompt_token_ids == ids
            expected = torch.from_numpy(oracle.logits(ids)).sigmoid()
            np.testing.assert_allclose(output.outputs.score, expected[0], atol=1e-12)


def test_the_prefix_cache_serves_the_last_token_alone(checkpoints) -> None:
    """A prompt that was computed is found again but for its last token; the mean needs all hidden states."""
    folder, (ids,) = checkpoints("LlamaModel"), prompts((64,))
    with open_llm(folder, "float64", block_size=8, max_num_batched_tokens=256) as llm:
        first, again = (llm.embed([ids], use_tqdm=False)[0] for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 63)
        np.testing.assert_allclose(again.outputs.embedding, first.outputs.embedding, atol=1e-12)
        for params in (PoolingParams(pooling_type="mean"), PoolingParams(task="token_embed")):
            assert llm.encode([ids], params, use_tqdm=False)[0].num_cached_tokens == 0
        stats = llm.llm_engine.stats()
        assert (stats.prompt_tokens, stats.generation_tokens, stats.pages_used) == (4 * 64, 0, 0)
        llm.llm_engine.client.core.check_integrity()
