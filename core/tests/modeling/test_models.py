"""Logits of whole models against transformers, for every architecture and feature."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, ROPES, VOCAB_SIZE, load_oracle
from plain import open_model, plain_walk, run

from engine.interfaces.model import State

CASES = {
    **{name: (name, {}) for name in ARCHITECTURES},
    **{f"rope-{rope}": ("LlamaForCausalLM", {"rope": rope}) for rope in ROPES if rope != "default"},
    "one-kv-head": ("LlamaForCausalLM", {"kv_heads": 1}),
    "no-grouping": ("Qwen3ForCausalLM", {"kv_heads": 4}),
    "llama-bias": ("LlamaForCausalLM", {"bias": True}),
    "qwen3-bias": ("Qwen3ForCausalLM", {"bias": True}),
    "mistral-sliding": ("MistralForCausalLM", {"sliding": 7}),
    "qwen2-sliding": ("Qwen2ForCausalLM", {"sliding": 9}),
    "qwen3-sliding": ("Qwen3ForCausalLM", {"sliding": 1, "layers": 4}),
    "tied": ("Qwen2ForCausalLM", {"tie": True}),
    "sharded": ("LlamaForCausalLM", {"shards": 3}),
    "head-80": ("MistralForCausalLM", {"head_dim": 80}),
    "deepseek-v2": ("DeepseekV2ForCausalLM", {"bias": True, "q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {"rope": "yarn-mscale", "bias": True}),
    "deepseek-v3-in-halves": ("DeepseekV3ForCausalLM", {"rope_interleave": False, "tie": True}),
    "qwen3-yarn": ("Qwen3ForCausalLM", {"rope": "yarn", "tie": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_logits(checkpoints, case: str, dtype: torch.dtype) -> None:
    """A prompt at once, then in chunks with single tokens: both give transformers' logits."""
    architecture, features = CASES[case]
    folder = checkpoints(architecture, **features)
    ids = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = load_oracle(folder, dtype)(torch.tensor([ids])).logits[0]
    tolerance = 1e-11 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(run(open_model(folder, dtype), ids), expected, rtol=tolerance, atol=tolerance)
    model = open_model(folder, dtype)
    pieces = [run(model, ids[a:b], a) for a, b in ((0, 17), (17, 50), *((i, i + 1) for i in range(50, 60)))]
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_cast_on_load(checkpoints, stored: str) -> None:
    """A file of half precision computes in float32 as transformers does after its cast."""
    folder = checkpoints("LlamaForCausalLM", dtype=stored)
    with torch.no_grad():
        expected = load_oracle(folder, torch.float32)(torch.tensor([[1, 2, 3]])).logits[0]
    torch.testing.assert_close(run(open_model(folder, torch.float32), [1, 2, 3]), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_runs_in_bfloat16(checkpoints) -> None:
    """Activations and logits have the model's dtype, and are near transformers'."""
    folder = checkpoints("Qwen3ForCausalLM", dtype="bfloat16")
    with torch.no_grad():
        expected = load_oracle(folder, torch.bfloat16)(torch.tensor([[1, 2, 3]])).logits[0]
    logits = run(open_model(folder, torch.bfloat16), [1, 2, 3])
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_walk_owns_the_layers(checkpoints) -> None:
    """The walk sees every layer and the state before and after it; a state with `hidden` is not embedded again."""
    model = open_model(checkpoints("LlamaForCausalLM", layers=3), torch.float32)
    seen: list[tuple[int, torch.Tensor]] = []

    def recording(layers: Any, state: State) -> Iterator[Any]:
        for index, layer in enumerate(layers):
            seen.append((index, state["hidden"].clone()))
            yield layer

    def new_state(**tensors: torch.Tensor) -> State:
        return State(token_ids=torch.tensor([7, 8], dtype=torch.int32), positions=torch.arange(2), **tensors)

    state = new_state()
    final = model.forward(state, recording)
    assert [index for index, _ in seen] == [0, 1, 2] and {"hidden", "residual"} <= state.keys()
    model = open_model(checkpoints("LlamaForCausalLM", layers=3), torch.float32)  # fresh caches
    assert torch.equal(model.forward(new_state(hidden=seen[0][1]), plain_walk), final)


def test_counts(checkpoints) -> None:
    """Parameters as transformers counts them, tied ones once."""
    for tie in (False, True):
        folder = checkpoints("Qwen2ForCausalLM", tie=tie)
        model, oracle = open_model(folder, torch.float64), load_oracle(folder, torch.float32)
        assert model.num_parameters() == oracle.num_parameters()
        assert model.weight_bytes() == 8 * oracle.num_parameters()
