"""A quantised engine against one whose checkpoint was rounded beforehand: the same tokens, in float64."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Checkpoints
from plain import body_of, describe, make_context, plain_walk
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.interfaces.model import State
from engine_kit.dispatch_guard import DispatchGuard
from engine_kit.safetensors_files import read_safetensors
from engine_reference.quantization_absmax.absmax import AbsmaxBody, dequantize, quantize
from engine_reference.quantization_absmax.card import AbsmaxOptions

SETTINGS = {"dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 60, "block_size": 4}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = [{"prompt_token_ids": np.random.default_rng(i).integers(0, 256, 7 + 20 * i).tolist()} for i in range(3)]
PROJECTION = re.compile(r"(q|k|v|o|gate|up|down)_proj\.weight$")


def rounded(folder: Path, bits: int, group: int, head: bool) -> Path:
    """A copy of a checkpoint with the rounded weights, in float64."""
    copy = folder.parent / f"{folder.name}-rounded-{bits}-{group}-{head}"
    if copy.exists():
        return copy
    copy.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        tensors[name] = weight.double()
        if PROJECTION.search(name) or (head and name == "lm_head.weight"):
            codes, scales = quantize(weight, bits, group)
            tensors[name] = dequantize(codes, scales.double(), weight.shape[1], bits, group).contiguous()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (copy / file.name).write_bytes(file.read_bytes())
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def outcomes(folder: Path, **settings: Any) -> list[tuple[list[int], list[float]]]:
    with LLM(model=folder, **SETTINGS | settings) as llm:
        outputs = [o.outputs[0] for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [
        (list(o.token_ids), [round(e[t].logprob, 9) for t, e in zip(o.token_ids, o.logprobs, strict=True)])
        for o in outputs
    ]


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 16)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_the_tokens_of_the_rounded_checkpoint(
    checkpoints: Checkpoints, architecture: str, bits: int, group: int
) -> None:
    folder = checkpoints(architecture, dtype="bfloat16", bias=True)
    options = {"quantization.bits": bits, "quantization.group_size": group}
    found = outcomes(folder, quantization="absmax", **options)
    assert found == outcomes(rounded(folder, bits, group, head=True))
    plain = outcomes(folder)
    assert found != plain  # it did something
    found = outcomes(folder, quantization="linear=absmax", **options)
    assert found == outcomes(rounded(folder, bits, group, head=False))


def test_a_tied_head_is_rounded_and_the_embedding_is_not(checkpoints: Checkpoints) -> None:
    folder = checkpoints("LlamaForCausalLM", tie=True)
    description, weights, card = describe(folder)
    body = AbsmaxBody(type("Context", (), {"options": AbsmaxOptions(bits=4, group_size=8)})())  # type: ignore[arg-type]
    model = body_of(card)(make_context(description, quantization={"head": body}))
    model.load_weights(read_safetensors(weights))
    table = dict(read_safetensors(weights))["model.embed_tokens.weight"]
    assert torch.equal(model.embed.weight, table.to(model.embed.weight.dtype))
    codes, scales = quantize(table, 4, 8)
    back = dequantize(codes, scales.float(), table.shape[1], 4, 8)
    hidden = torch.randn(3, table.shape[1])
    torch.testing.assert_close(model.logits(hidden), hidden @ back.T, rtol=1e-5, atol=1e-5)
    assert model.weight_bytes() == model.num_parameters() * 4 + codes.numel() // 2 + scales.nbytes


def test_ranks_round_their_own_part(checkpoints: Checkpoints) -> None:
    """Groups that do not cross a rank's border are the same groups: the same tokens."""
    folder = checkpoints("LlamaForCausalLM", dtype="bfloat16")
    options = {"quantization": "absmax", "quantization.bits": 4, "quantization.group_size": 8}
    assert outcomes(folder, tensor_parallel_size=2, **options) == outcomes(folder, **options)


def test_a_quantised_model_passes_the_guard(checkpoints: Checkpoints) -> None:
    """It computes through its driver, and nothing beside it."""
    description, weights, card = describe(checkpoints("Qwen3ForCausalLM", tie=True))
    body = AbsmaxBody(type("Context", (), {"options": AbsmaxOptions()})())  # type: ignore[arg-type]
    guard = DispatchGuard()
    context = guard.context(make_context(description, quantization={"linear": body, "head": body}))
    model = body_of(card)(context)
    model.load_weights(read_safetensors(weights))
    state = State(token_ids=torch.tensor([3, 1, 4], dtype=torch.int32), positions=torch.arange(3))
    with guard:
        logits = model.logits(model.forward(state, plain_walk))
    assert logits.isfinite().all()


def test_what_the_worker_tells_of_its_weights(checkpoints: Checkpoints) -> None:
    folder = checkpoints("LlamaForCausalLM", dtype="bfloat16")
    sizes = {}
    for quantization in (None, "linear=absmax", "absmax"):
        settings = {} if quantization is None else {"quantization": quantization}
        with LLM(model=folder, **SETTINGS | {"dtype": "bfloat16"}, **settings) as llm:
            ready = llm.llm_engine.client.worker
        sizes[quantization] = ready.weight_bytes
        assert ready.num_parameters * 2 >= ready.weight_bytes
    tensors = load_file(folder / "model.safetensors")
    projections = sum(t.numel() for name, t in tensors.items() if PROJECTION.search(name))
    outputs = sum(t.shape[0] for name, t in tensors.items() if PROJECTION.search(name))
    assert sizes[None] - sizes["linear=absmax"] == projections - 4 * outputs
    head = tensors["lm_head.weight"]
    assert sizes["linear=absmax"] - sizes["absmax"] == head.numel() - 4 * head.shape[0]
