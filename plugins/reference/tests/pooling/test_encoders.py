"""BERT-class encoders against transformers: embeddings, labels, scores of pairs; whole prompts without a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pooling_models import ENCODERS, Oracle, pooled, prompts, unit

from engine import LLM, EngineArgs, LLMEngine, PoolingParams

LENGTHS = (23, 1, 40, 5, 64, 16, 33)
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def open_llm(folder: Path, dtype: str = "float32", **settings: object) -> LLM:
    return LLM(folder, dtype=dtype, **{"max_num_seqs": 4, "max_num_batched_tokens": 80, **settings})


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["cls", "mean", "last", None])
@pytest.mark.parametrize("family", ENCODERS)
def test_embeddings(checkpoints, family: str, kind: str | None, dtype: str) -> None:
    """All positions are used; steps hold several prompts. Without further files, the first token is taken."""
    folder = checkpoints(f"{family}Model")
    oracle, given = Oracle(folder, getattr(torch, dtype)), prompts(LENGTHS)
    with open_llm(folder, dtype) as llm:
        found = llm.embed(given, PoolingParams(pooling_type=kind), use_tqdm=False)
    for ids, output in zip(given, found, strict=True):
        expected = unit(pooled(oracle.states(ids), kind or "cls"))
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_of_tokens(checkpoints, family: str) -> None:
    folder = checkpoints(f"{family}Model")
    oracle, given = Oracle(folder, torch.float64), prompts(LENGTHS)
    with open_llm(folder, "float64") as llm:
        found = llm.encode(given, PoolingParams(task="token_embed", normalize=False), use_tqdm=False)
    for ids, output in zip(given, found, strict=True):
        np.testing.assert_allclose(output.outputs.data, oracle.states(ids), atol=1e-12)


@pytest.mark.parametrize(
    "features", [{"hidden_act": "gelu_new"}, {"type_vocab_size": 1}, {"layer_norm_eps": 0.1}], ids=str
)
def test_features_of_the_config(checkpoints, features: dict[str, object]) -> None:
    folder = checkpoints("BertModel", **features)
    oracle, given = Oracle(folder, torch.float64), prompts(LENGTHS[:4])
    with open_llm(folder, "float64") as llm:
        found = llm.embed(given, use_tqdm=False)
    for ids, output in zip(given, found, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, unit(oracle.states(ids)[0]), atol=1e-12)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", ENCODERS)
def test_labels(checkpoints, family: str, labels: int) -> None:
    folder = checkpoints(f"{family}ForSequenceClassification", num_labels=labels)
    oracle, given = Oracle(folder, torch.float64), prompts(LENGTHS)
    with open_llm(folder, "float64") as llm:
        found = llm.classify(given, use_tqdm=False)
        bare = llm.encode(given, PoolingParams(use_activation=False), use_tqdm=False)
    for ids, output, logits in zip(given, found, bare, strict=True):
        expected = torch.from_numpy(oracle.logits(ids))
        np.testing.assert_allclose(logits.outputs.data, expected, atol=1e-12)
        expected = expected.sigmoid() if labels == 1 else expected.softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-12)


@pytest.mark.parametrize("family", ENCODERS)
def test_scores_of_pairs(checkpoints, family: str) -> None:
    """BERT tells the two texts apart by token types, RoBERTa by the separator alone."""
    folder = checkpoints(f"{family}ForSequenceClassification", num_labels=1)
    oracle = Oracle(folder, torch.float64)
    first, second = ["what is it?", "ab", ""], ["a cat", "the rain", "nothing"]
    with open_llm(folder, "float64") as llm:
        found = llm.score(first, second, use_tqdm=False)
        one = llm.score(first[0], second, use_tqdm=False)
        encode = llm.get_tokenizer().encode
        for a, b, output in zip(first, second, found, strict=True):
            head, tail = encode(a), encode(b)[1:]
            types = [0] * len(head) + [1 if family == "Bert" else 0] * len(tail)
            assert output.prompt_token_ids == head + tail
            expected = torch.from_numpy(oracle.logits(head + tail, types)).sigmoid()
            np.testing.assert_allclose(output.outputs.score, expected[0], atol=1e-12)
        assert one[0].outputs.score == pytest.approx(found[0].outputs.score, abs=1e-12)
        untyped = llm.classify([{"prompt_token_ids": found[0].prompt_token_ids}], use_tqdm=False)[0].outputs.probs[0]
        assert (abs(untyped - found[0].outputs.score) > 1e-6) == (family == "Bert")


@pytest.mark.parametrize("settings", [{"in_flight": 1}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 64}], ids=str)
def test_a_schedule_changes_nothing(checkpoints, settings: dict[str, int]) -> None:
    """And nothing is cached, held or preempted."""
    folder, given = checkpoints("BertModel"), prompts((60, 3, 9, 64, 64, 1, 30, 20, 5))
    with open_llm(folder, "float64", max_num_seqs=9, max_num_batched_tokens=512) as llm:
        expected = [output.outputs.embedding for output in llm.embed(given, use_tqdm=False)]
    with open_llm(folder, "float64", **settings) as llm:
        for _ in range(2):
            found = llm.embed(given, use_tqdm=False)
            np.testing.assert_allclose([output.outputs.embedding for output in found], expected, atol=1e-12)
            assert {output.num_cached_tokens for output in found} == {0}
        stats = llm.llm_engine.stats()
        assert (stats.pages_used, stats.num_preemptions, stats.prefix_queries) == (0, 0, 0)
        assert stats.prompt_tokens == 2 * sum(map(len, given))
        llm.llm_engine.client.core.check_integrity()


def test_a_prompt_is_never_cut(checkpoints) -> None:
    """Whatever is left of a step's budget, a prompt that does not fit waits for the next; those behind it wait too."""
    folder, given = checkpoints("BertModel"), prompts((50, 40, 10))
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=str(folder), max_num_batched_tokens=64, max_num_seqs=4, in_flight=1)
    )
    with engine:
        for index, ids in enumerate(given):
            engine.add_request(str(index), ids, PoolingParams())
        ended = []
        while engine.has_unfinished_requests():
            ended.append(sorted(output.request_id for output in engine.step()))
        assert ended == [["0"], ["1", "2"]]


def test_old_names_of_tensors(checkpoints, tmp_path: Path) -> None:
    """Norms named gamma and beta, counters among the weights, and the heads of pre-training."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "old"
    shutil.copytree(checkpoints("BertModel"), folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        tensors["bert." + name] = tensor
    tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
    tensors["cls.predictions.bias"] = torch.zeros(9)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    given = prompts((9, 12))
    with open_llm(folder) as llm, open_llm(checkpoints("BertModel")) as other:
        found, expected = (
            [output.outputs.embedding for output in one.embed(given, use_tqdm=False)] for one in (llm, other)
        )
    assert found == expected


def test_engine_cores_behind_a_router(checkpoints) -> None:
    """Two of them, in processes of their own; a model that keeps nothing has no cache for routers to think of."""
    folder, given = checkpoints("BertModel"), prompts((9, 30, 64, 4))
    with open_llm(folder, "float64") as one, open_llm(folder, "float64", data_parallel_size=2) as two:
        expected, found = (
            [output.outputs.embedding for output in llm.embed(given, use_tqdm=False)] for llm in (one, two)
        )
    np.testing.assert_allclose(found, expected, atol=1e-12)
