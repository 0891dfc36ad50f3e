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

from safetensors.torch import load_file, save_file
from scaled import needs_scales_of_rows

from engine import LLM, SamplingParams
from engine.types.errors import UnfitDriverError
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


def test_what_it_does_not_serve_is_refused() -> None:
    with pytest.raises(UnfitDriverError, match="'fp8'.*dtype float32 is not one of bfloat16, float16"):
        LLM(dtype="float32", quantization="fp8")
