"""The engine with quantization `fp8`, as a user chooses it: its kernels interpreted, on the processor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")
pytest.importorskip("engine_tiny", reason="engine-tiny is not installed")

import harness
from harness import Driver, Request, params, prompt
from safetensors.torch import load_file, save_file
from scaled import needs_scales_of_rows

from engine import LLM, SamplingParams
from engine.interfaces.ops import OPERATIONS
from engine.types.errors import UnfitDriverError
from engine_cuda.quantization_fp8.body import Fp8Layer
from engine_cuda.quantization_fp8.card import Fp8Options
from engine_cuda.quantization_fp8.rows import quantize_weight
from engine_tiny import model_folder

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_pages": 60, "block_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
TEXTS = ["Once upon a time", "What is the capital of France? Tell me in one word, please."]


def scores(**settings: Any) -> np.ndarray:
    """The log probabilities of the prompts' own tokens."""
    with LLM(**SETTINGS | settings) as llm:
        outputs = llm.generate(TEXTS, GREEDY, use_tqdm=False)
    return np.array([
        entry[token].logprob
        for output in outputs
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry
    ])  # fmt: skip


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with its weights rounded as the driver rounds them, in float32: a plain checkpoint."""
    folder = tmp_path_factory.mktemp("rounded") / "model"
    shutil.copytree(model_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for name, weight in tensors.items():
        tensors[name] = weight.float()
        if name.endswith("proj.weight") or name == "lm_head.weight":
            codes, scales = quantize_weight(weight, *weight.shape, per_channel=True)
            tensors[name] = codes.float() * scales.T
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False, "torch_dtype": "float32"}))
    return str(Path(folder))


@pytest.mark.slow
@needs_scales_of_rows
def test_the_bundled_model_says_what_its_rounded_weights_say(rounded: str) -> None:
    """As plain weights of the same numbers in float64, but for the rounding of rows; the head in 8 bits, or plain."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no GPU")
    expected = scores(model=rounded, dtype="float64")
    plain = scores(dtype="float64")
    found = scores(dtype="bfloat16", quantization="fp8")
    # Log probabilities go down to -25, and a model of 4 M parameters feels three bits. What rounding weights costs,
    # rounding rows costs again, in each of 6 layers; wrong scales or a wrong order of weights cost several units.
    lost = np.abs(expected - plain).mean()
    assert 0 < lost < 0.25 and np.abs(found - expected).mean() < 0.4
    layers = scores(dtype="bfloat16", quantization="linear=fp8")
    assert np.abs(layers - expected).mean() < 0.4 and (layers != found).any()


@needs_scales_of_rows
@pytest.mark.parametrize("weights", ["channel", pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_model_whose_rows_are_rounded_as_they_are_made(monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    """Prompts and a decode of a small random model give the tokens of one whose rows are rounded by themselves, and its
    log probabilities but for the order in which a norm's squares are added up."""
    calls: list[str] = []
    for name in ("after_norm", "after_silu"):
        joined = getattr(Fp8Layer, name)
        monkeypatch.setattr(
            Fp8Layer, name, lambda *given, joined=joined, name=name: (calls.append(name), joined(*given))[1]
        )
    found, registry, rounding = [], harness.registry(), ("rms_norm", "add_rms_norm", "silu_mul")
    for fused in (True, False):
        calls.clear()
        options = Fp8Options(weights=weights, few_rows=0, fused=fused).model_dump()  # type: ignore[arg-type]
        choices = [choice for choice in harness.start_message().choices if choice.point != "ops"]
        choices += [
            harness.choice(registry, "ops", "triton" if name in rounding else "torch", name) for name in OPERATIONS
        ]
        choices.append(harness.choice(registry, "quantization", "fp8", "linear", options))
        driver = Driver(harness.started(choices=tuple(choices), dtype="bfloat16"))
        requests = [Request(prompt(2 - slot, slot), params(logprobs=3), slot) for slot in range(2)]
        driver.step(*((request, len(request.prompt)) for request in requests))
        driver.step(*((request, 1) for request in requests))
        # Of three layers each step rounds the rows of two norms and an activation.
        assert calls.count("after_norm") == 12 * fused and calls.count("after_silu") == 6 * fused
        found.append(requests)
    for one, other in zip(*found, strict=True):
        assert one.outputs == other.outputs and len(one.outputs) == 2
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours[2] == theirs[2]
            np.testing.assert_allclose(ours[3], theirs[3], rtol=0, atol=0.05)


@pytest.mark.slow
@needs_scales_of_rows
def test_rounding_rows_as_they_are_made_gives_the_same_tokens() -> None:
    """The bundled model, by --quantization.fused."""
    found = []
    for fused in (True, False):
        options = {"quantization": {"fused": fused}}
        with LLM(**SETTINGS, dtype="bfloat16", quantization="fp8", ops="triton,torch", options=options) as llm:
            outputs = llm.generate(TEXTS, GREEDY, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]


def test_what_it_does_not_serve_is_refused() -> None:
    with pytest.raises(UnfitDriverError, match="'fp8'.*dtype float32 is not one of bfloat16, float16"):
        LLM(dtype="float32", quantization="fp8")
