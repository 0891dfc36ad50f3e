"""What the engines are given: workloads, checkpoints, the tokenizer, GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors import safe_open

from tests.benchmarks.conftest import TINY
from tests.benchmarks.peers.checkpoint import checkpoint, draw, write_checkpoint
from tests.benchmarks.peers.dimensions import MODELS
from tests.benchmarks.peers.gguf_file import gguf_name, read_safetensors, rotary_order
from tests.benchmarks.peers.roofline import bytes_per_token, operations_per_prompt_token
from tests.benchmarks.peers.tokenizer import tokenizer_json
from tests.benchmarks.peers.workloads import FIRST_ID, KV_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, WORKLOADS, Call


def calls(name: str, seed: int = 7) -> list[Call]:
    """Of the 10M model."""
    return WORKLOADS[name].draw(MODELS["10M"], seed)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_asks_the_same_and_another_seed_asks_something_else(name: str) -> None:
    assert calls(name) == calls(name)
    assert calls(name)[0][0].prompt != calls(name, seed=8)[0][0].prompt


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("model", MODELS)
def test_all_work_fits_what_the_engines_are_started_for(name: str, model: str) -> None:
    dimensions = MODELS[model]
    for seed in range(1_000, 1_010):
        for call in WORKLOADS[name].draw(dimensions, seed):
            assert len(call) <= MAX_NUM_SEQS
            assert all(len(request.prompt) + request.output_len <= MAX_MODEL_LEN for request in call)
            assert all(FIRST_ID <= token < dimensions.vocab_size for request in call for token in request.prompt)
            # Blocks are rounded up: at most 31 tokens more a request.
            assert sum(len(request.prompt) + request.output_len + 31 for request in call) <= KV_TOKENS


def test_the_work_is_what_the_page_says() -> None:
    one, offline, shared, prompts = (calls(name) for name in ("W1", "W2", "W3", "W4"))
    assert [[(len(r.prompt), r.output_len) for r in call] for call in one] == [[(128, 1)], [(128, 128)]] * 5
    assert len({tuple(call[0].prompt) for call in one}) == len(one)
    (requests,) = offline
    assert len(requests) == 64
    assert all(32 <= len(r.prompt) <= 512 and 32 <= r.output_len <= 256 for r in requests)
    assert len({len(r.prompt) for r in requests}) > 30
    (requests,) = shared
    assert [(len(r.prompt), r.output_len) for r in requests] == [(544, 32)] * 32
    assert len({tuple(r.prompt[:512]) for r in requests}) == 1
    assert len({tuple(r.prompt[512:]) for r in requests}) == 32
    assert [[(len(r.prompt), r.output_len) for r in call] for call in prompts] == [[(1024, 1)] * 8]


def test_figures_and_ratios() -> None:
    work = calls("W1")
    # 0.5 s to each first token, then 127 tokens in 2 s.
    assert WORKLOADS["W1"].figure(work, [0.5, 2.5] * 5) == pytest.approx(63.5)
    assert WORKLOADS["W2"].figure(calls("W2"), [2.0]) == sum(r.output_len for r in calls("W2")[0]) / 2
    assert WORKLOADS["W3"].figure(calls("W3"), [2.0]) == 2.0
    assert WORKLOADS["W4"].figure(calls("W4"), [2.0]) == 4096
    assert WORKLOADS["W2"].ratio(30, 20) == 1.5
    assert WORKLOADS["W3"].ratio(20, 30) == 1.5, "seconds: less is better"


@pytest.mark.parametrize(("name", "millions"), [("10M", 10.1), ("0.6B", 473.2), ("1B", 1_038.7)])
def test_the_models_have_their_sizes(name: str, millions: float) -> None:
    assert MODELS[name].num_parameters() / 1e6 == pytest.approx(millions, abs=0.06)


def test_what_a_token_reads_and_computes() -> None:
    assert bytes_per_token(MODELS["0.6B"]) == pytest.approx(946e6 + 192 * 28 * 2 * 8 * 128 * 2, rel=1e-3)
    one = MODELS["1B"]
    attention = 16 * 4 * 2048 * 512.5
    assert operations_per_prompt_token(one) == pytest.approx(2 * 973.1e6 + attention, rel=1e-3)


def test_a_checkpoint_has_its_shapes_and_is_a_function_of_the_seed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with safe_open(tiny_checkpoint / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == TINY.shapes()
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert json.loads((tiny_checkpoint / "config.json").read_text()) == TINY.config()
    embedding = tensors["model.embed_tokens.weight"].float()
    assert embedding.std() == pytest.approx(0.02, rel=0.05)
    assert abs(embedding.mean()) < 0.001
    assert (tensors["model.norm.weight"] == 1).all()
    keys = [tensors[f"model.layers.{i}.self_attn.k_proj.weight"] for i in range(2)]
    assert not torch.equal(*keys)
    again = write_checkpoint(TINY, tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny_checkpoint / name).read_bytes()
    assert not torch.equal(draw("a", (8, 8), 0), draw("a", (8, 8), 1))


def test_a_checkpoint_in_the_cache_is_not_written_twice(tmp_path: Path) -> None:
    folder = checkpoint(TINY, tmp_path)
    (folder / "mark").touch()
    assert checkpoint(TINY, tmp_path) == folder
    assert (folder / "mark").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing half-written is left"


@pytest.mark.parametrize("size", [320, 8192, 32_000])
def test_the_tokenizer_has_the_vocabulary_and_gives_every_text_back(size: int) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(size)))
    assert tokenizer.get_vocab_size() == size
    assert tokenizer.decode(tokenizer.encode("Grüße, words and 你好\n").ids) == "Grüße, words and 你好\n"
    ids = range(FIRST_ID, size, 7)
    assert tokenizer.token_to_id("ab") == 260
    assert all(tokenizer.id_to_token(i) is not None for i in ids)


def test_a_tokenizer_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes are 259"):
        tokenizer_json(258)


def test_gguf_has_a_name_for_every_tensor() -> None:
    names = [gguf_name(name) for name in MODELS["10M"].shapes()]
    assert len(set(names)) == len(names)
    assert {"token_embd.weight", "output.weight", "output_norm.weight", "blk.5.ffn_down.weight"} <= set(names)


def test_the_bits_of_a_checkpoint_are_read_as_torch_reads_them(tiny_checkpoint: Path) -> None:
    bits = read_safetensors(tiny_checkpoint / "model.safetensors")
    assert {name: array.shape for name, array in bits.items()} == TINY.shapes()
    name = "model.layers.1.mlp.up_proj.weight"
    expected = draw(name, TINY.shapes()[name], 0).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bits[name], expected)


def test_rotary_order_makes_neighbours_of_what_the_checkpoint_rotates_together() -> None:
    """Hugging Face rotates elements i and i + half of a head; llama.cpp's Llama 2i and 2i + 1."""
    heads, size, hidden = 3, 8, 5
    weight = np.arange(heads * size * hidden).reshape(heads * size, hidden)
    ordered = rotary_order(weight, heads).reshape(heads, size, hidden)
    whole = weight.reshape(heads, size, hidden)
    for i in range(size // 2):
        np.testing.assert_array_equal(ordered[:, 2 * i], whole[:, i])
        np.testing.assert_array_equal(ordered[:, 2 * i + 1], whole[:, i + size // 2])
