"""Tokens of models that are read from GGUF files, beside transformers' with the weights that the files stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_maker import BLOCK_TYPES, byte_vocabulary, greedy, tiny_model, write

from engine import LLM, SamplingParams
from engine.types.errors import ConfigError, UnfitDriverError

PROMPTS = [[5, 9, 77, 200, 31, 12, 40, 41, 42, 43], [1, 2, 3]]
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 60, "block_size": 4}
ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip

SAME_ROWS = 1e-3
"""How far log probabilities of ranks lie from those of one: rows are rounded alike, and sums are in another order."""


def answers(path: Path, *, count: int = 12, **settings: Any) -> list[Any]:
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, prompt_logprobs=1)
    with LLM(model=str(path), **SETTINGS | settings) as llm:
        return list(llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False))


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def scores(outputs: list[Any]) -> np.ndarray:
    """The log probabilities of the prompts' own tokens."""
    found = [
        entry[token].logprob
        for output in outputs
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry
    ]
    return np.array(found)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture: str, tmp_path: Path) -> None:
    """Each matrix in a type of its own: as Q4_K_M files have them, in 4 and in 6 bits."""
    model = tiny_model(architecture)
    path = write(
        tmp_path / "model.gguf", model, lambda name: "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K",
        vocabulary=byte_vocabulary(),
    )  # fmt: skip
    found = answers(path, dtype="float32", quantization="gguf")
    assert tokens(found) == greedy(model, PROMPTS, 12)


@pytest.mark.parametrize("kind", (*BLOCK_TYPES, "F16", "BF16", "F32"))
def test_types(kind: str, tmp_path: Path) -> None:
    """Every type, through the driver that is taken by itself: the native one, where it is built, is near what the
    weights say, and the portable one gives the tokens."""
    model = tiny_model("LlamaForCausalLM")
    path = write(tmp_path / "model.gguf", model, kind, vocabulary=byte_vocabulary())
    plain = {} if kind in ("BF16", "F32") else {"quantization": "gguf"}
    exact = answers(path, dtype="float32", **plain)
    assert tokens(exact) == greedy(model, PROMPTS, 12)
    near = answers(path, dtype="float32")
    assert np.abs(scores(near) - scores(exact)).mean() < 0.1  # of log probabilities down to -20


def test_what_changes_the_config(tmp_path: Path) -> None:
    """Stretched positions, biases, a head of its own, windows."""
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5000.0}
    for place, (architecture, more) in enumerate(
        [
            ("LlamaForCausalLM", {"rope_parameters": linear, "tie_word_embeddings": True}),
            ("LlamaForCausalLM", {"rope_parameters": yarn, "attention_bias": True, "mlp_bias": True}),
            ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
            ("MistralForCausalLM", {"sliding_window": 6}),
            ("Phi3ForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                     "partial_rotary_factor": 0.5}}),
        ]
    ):  # fmt: skip
        model = tiny_model(architecture, **more)
        path = write(tmp_path / f"{place}.gguf", model, "Q8_0", vocabulary=byte_vocabulary())
        found = answers(path, dtype="float32", quantization="gguf")
        assert tokens(found) == greedy(model, PROMPTS, 12), (architecture, more)


def test_llama_3s_frequencies(tmp_path: Path) -> None:
    """A file has them worked out, as factors."""
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    }  # fmt: skip
    model = tiny_model("LlamaForCausalLM", rope_parameters=rope)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)

    def more(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    path = write(tmp_path / "model.gguf", model, "Q8_0", more=more, vocabulary=byte_vocabulary())
    assert tokens(answers(path, dtype="float32", quantization="gguf")) == greedy(model, PROMPTS, 12)


def test_an_embedding_stays_as_it_is_stored(tmp_path: Path) -> None:
    """It takes the file's bytes, and a head that shares its matrix none more; by both drivers, whole and over ranks."""
    for tied in (True, False):
        model = tiny_model("LlamaForCausalLM", tie_word_embeddings=tied)
        path = write(tmp_path / f"{tied}.gguf", model, lambda name: "F16" if "attn" in name else "Q6_K",
                     vocabulary=byte_vocabulary())  # fmt: skip
        expected, config = greedy(model, PROMPTS, 12), model.config
        matrix = 272 * config.hidden_size // 256 * 210
        layers = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.ndim == 2)
        feed = 3 * config.hidden_size * config.intermediate_size * config.num_hidden_layers
        norms = 4 * sum(p.numel() for p in model.parameters() if p.ndim == 1)
        in_file = (1 if tied else 2) * matrix + 2 * (layers - feed) + feed * 210 // 256 + norms
        for driver in ("gguf", None):
            chosen = {} if driver is None else {"quantization": driver}
            with LLM(model=str(path), dtype="float32", **SETTINGS, **chosen) as llm:
                held: int = llm.llm_engine.client.worker.weight_bytes
                slack = 0 if driver else 2 * 32 * matrix // 272  # outputs filled up to 32
                assert in_file <= held <= in_file + slack, (tied, driver)
        assert tokens(answers(path, dtype="float32", quantization="gguf")) == expected
        native = scores(answers(path, dtype="float32"))
        assert np.abs(native - scores(answers(path, dtype="float32", quantization="gguf"))).mean() < 0.1
        if tied:
            two = answers(path, dtype="float32", quantization="gguf", tensor_parallel_size=2)
            assert tokens(two) == expected
            assert np.abs(scores(answers(path, dtype="float32", tensor_parallel_size=2)) - native).max() < SAME_ROWS


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "GemmaForCausalLM"])
def test_by_transformers_modules(architecture: str, tmp_path: Path) -> None:
    """Both ends share the file's bytes there too, also where a class of transformers scales the rows that it finds."""
    pytest.importorskip("engine_transformers", reason="engine-transformers is not installed")
    model = tiny_model(architecture, tie_word_embeddings=True)
    path = write(tmp_path / "model.gguf", model, "Q6_K", vocabulary=byte_vocabulary())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) * 210 // 256
    vectors = 4 * sum(p.numel() for p in model.parameters() if p.ndim == 1)
    exact = {"dtype": "float32", "quantization": "gguf", "model_impl": "transformers", **SETTINGS}
    with LLM(model=str(path), **exact) as llm:
        assert llm.llm_engine.client.worker.weight_bytes == matrices + vectors
    found = answers(path, **exact)
    assert tokens(found) == greedy(model, PROMPTS, 12)
    near = answers(path, dtype="float32", model_impl="transformers")
    assert np.abs(scores(near) - scores(found)).mean() < 0.1


def test_a_driver_for_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    """Is named for both, or the start says so; one for the embedding alone has the head too."""
    model = tiny_model("Qwen3ForCausalLM", tie_word_embeddings=True, layers=1)
    path = write(tmp_path / "model.gguf", model, "Q8_0", vocabulary=byte_vocabulary())
    for named, said in (
        ("linear=gguf,head=gguf", "head is its embedding, which is plain"),
        ("linear=gguf,head=gguf_cpu,embedding=gguf", "head is its embedding, which 'gguf' packs"),
    ):
        with pytest.raises(ConfigError, match=said):
            answers(path, dtype="float32", quantization=named)
    for named in ("linear=gguf", "linear=gguf,embedding=gguf"):
        assert tokens(answers(path, dtype="float32", quantization=named)) == greedy(model, PROMPTS, 12), named


def test_a_driver_of_the_model_that_leaves_embeddings_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is plain with it, where nobody asked for anything else."""
    monkeypatch.setattr("engine_reference.models.llama_card._Family.quantized", frozenset({"linear", "head"}))
    model = tiny_model("Qwen3ForCausalLM", tie_word_embeddings=True, layers=1)
    path = write(tmp_path / "model.gguf", model, "Q8_0", vocabulary=byte_vocabulary())
    assert tokens(answers(path, dtype="float64")) == greedy(model, PROMPTS, 12, torch.float64)
    with pytest.raises(ConfigError, match="head is its embedding, which is plain"):
        answers(path, dtype="float64", quantization="gguf")


def test_parts_and_ranks(tmp_path: Path) -> None:
    """A model in several files, over two ranks: by the portable driver, and by the processor's own."""
    model = tiny_model(
        "LlamaForCausalLM", hidden=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4
    )
    path = write(tmp_path / "model.gguf", model, "Q4_K", vocabulary=byte_vocabulary(), parts=2)
    expected = greedy(model, PROMPTS, 8, torch.float64)
    one = answers(path, count=8, dtype="float64", quantization="gguf")
    assert tokens(one) == expected
    two = answers(path, count=8, dtype="float64", quantization="gguf", tensor_parallel_size=2)
    assert tokens(two) == expected
    native, over_two = (answers(path, count=8, dtype="float32", tensor_parallel_size=size) for size in (1, 2))
    assert np.abs(scores(native) - scores(one)).mean() < 0.1
    assert np.abs(scores(over_two) - scores(native)).max() < SAME_ROWS


def test_another_quantization_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tiny_model("LlamaForCausalLM"), "Q4_0", vocabulary=byte_vocabulary())
    with pytest.raises(UnfitDriverError, match="does not read weights stored as 'gguf'"):
        LLM(model=str(path), quantization="absmax", **SETTINGS)
