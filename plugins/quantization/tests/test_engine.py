"""Whole models whose weights are stored in each form, beside the same numbers as a plain checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Checkpoints
from safetensors.torch import load_file, save_file
from written import CASES, Case

from engine import LLM, SamplingParams
from engine.types.errors import EngineError
from engine_quantization.methods import method_of

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 60, "block_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, prompt_logprobs=1)
TEXTS = ["Once upon a time", "What is the capital of France?"]
SIZES: dict[str, Any] = {"heads": 4, "head_dim": 64, "hidden": 256, "intermediate_size": 512}
LATENT: dict[str, Any] = {"hidden": 256, "intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 64}
MOE: dict[str, Any] = {"hidden": 128, "head_dim": 64, "moe_intermediate_size": 64, "num_experts": 4,
                       "num_experts_per_tok": 2}  # fmt: skip
NEAR = 0.3
"""How far log probabilities down to -25 move where rows are rounded: random models make much of little."""
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5, "hidden": 64, "intermediate_size": 64,
}  # fmt: skip


def kind_of(name: str) -> str:
    """As models have it; "" for what is never stored in fewer bits."""
    if name == "lm_head":
        return "head"
    return "expert" if ".experts." in name else "linear" if "_proj" in name else ""


def stacked(case: Case, name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """gpt-oss' experts, [E, in, out] of one tensor."""
    each = [case.write("", expert.T.contiguous().numpy()) for expert in tensor.float()]
    keys = each[0][0]
    return (
        {f"{name}_{key[1:]}": torch.stack([tensors[key] for tensors, _ in each]) for key in keys},
        torch.from_numpy(np.stack([meant.T for _, meant in each])),
    )


def write(folder: Path, to: Path, case: Case) -> tuple[Path, Path]:
    """The checkpoint with its weights in the form, and with what these stand for."""
    method = method_of(case.stored)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        kind = kind_of(layer) if name.endswith(".weight") or tensor.ndim == 3 else ""
        if not kind or method.form(layer, kind) is None:
            stored[name] = plain[name] = tensor
            continue
        write_one: Callable[..., Any] = case.write if tensor.ndim == 2 else lambda n, t: stacked(case, n, t)
        tensors, meant = write_one(layer, tensor.float().numpy() if tensor.ndim == 2 else tensor)
        stored |= tensors
        plain[name] = torch.as_tensor(meant).double().contiguous()
    assert len(stored) > len(plain)
    folders = to / "stored", to / "plain"
    for place, tensors in zip(folders, (stored, plain), strict=True):
        shutil.copytree(folder, place)
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": case.stored}))
    return folders


def with_default_head(case: Case) -> Case:
    """Without a list of what is left out, which leaves the head out."""
    return case._replace(stored={key: value for key, value in case.stored.items() if key != "modules_to_not_convert"})


def answers(folder: Path, **settings: Any) -> list[Any]:
    with LLM(model=folder, **SETTINGS | settings) as llm:
        return llm.generate(TEXTS, GREEDY, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def scores(outputs: list[Any]) -> np.ndarray:
    """Log probabilities of the prompts' own tokens."""
    return np.array(
        [
            entry[token].logprob
            for output in outputs
            for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            if entry
        ]
    )


QUICK = ("awq", "gptq ordered", "w4a16 asymmetric", "w8a8", "deepseek", "nf4 nested")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES if name != "mxfp4"],
)
def test_a_stored_model_says_what_its_weights_stand_for(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    """The same tokens in float64; on the processor's own way the same but for the rounding of rows."""
    stored, plain = write(checkpoints("LlamaForCausalLM", **SIZES), tmp_path, CASES[name])
    expected = answers(plain, dtype="float64")
    assert tokens(answers(stored, dtype="float64")) == tokens(expected)
    native = answers(stored, dtype="float32")
    assert np.abs(scores(native) - scores(expected)).mean() < NEAR


@pytest.mark.parametrize(
    "name",
    ["awq", "gptq ordered", pytest.param("deepseek", marks=pytest.mark.slow),
     pytest.param("nf4 nested", marks=pytest.mark.slow)],
)  # fmt: skip
def test_over_two_ranks(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    """Each has whole groups, or, of groups in whatever order, parts of them."""
    stored, plain = write(
        checkpoints("LlamaForCausalLM", kv_heads=4, **SIZES), tmp_path, with_default_head(CASES[name])
    )
    expected = answers(plain, dtype="float64")
    assert tokens(answers(stored, dtype="float64", tensor_parallel_size=2)) == tokens(expected)
    native = answers(stored, dtype="float32", tensor_parallel_size=2)
    assert np.abs(scores(native) - scores(expected)).mean() < NEAR


@pytest.mark.parametrize(
    ("architecture", "name", "sizes"),
    [
        ("DeepseekV3ForCausalLM", "deepseek", LATENT),
        ("Qwen3MoeForCausalLM", "w4a16 asymmetric", MOE),
        pytest.param("Qwen3MoeForCausalLM", "gptq", MOE, marks=pytest.mark.slow),
        ("GptOssForCausalLM", "mxfp4", GPT_OSS),
    ],
)
def test_experts_and_latents(
    checkpoints: Checkpoints, tmp_path: Path, architecture: str, name: str, sizes: dict[str, Any]
) -> None:
    """Routed experts, each in its tensors or all in one; the latent's projections, whose rows belong elsewhere."""
    stored, plain = write(checkpoints(architecture, **sizes), tmp_path, with_default_head(CASES[name]))
    expected = answers(plain, dtype="float64")
    assert tokens(answers(stored, dtype="float64")) == tokens(expected)
    native = answers(stored, dtype="float32")
    assert np.abs(scores(native) - scores(expected)).mean() < NEAR


def test_what_runs_is_smaller(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Nobody names a driver; the processor's is taken, and holds the weights as they were stored."""
    stored, plain = write(checkpoints("LlamaForCausalLM", **SIZES), tmp_path, CASES["w4a16"])
    with (
        LLM(model=stored, dtype="bfloat16", **SETTINGS) as llm,
        LLM(model=plain, dtype="bfloat16", **SETTINGS) as other,
    ):
        small, large = (one.llm_engine.client.worker.weight_bytes for one in (llm, other))
    assert small < 0.45 * large


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"bits": 3}, "AWQ's bits is 3; what is read is 4"),
        ({"version": "gemv"}, "AWQ's version is 'gemv'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"bits": "four"}, "bits: input should be a valid integer"),
        ({"quant_method": "exl3"}, "stored as 'exl3'"),
        ({"group_size": 48}, r"of the wrong form: .*qzeros"),
        ({"modules_to_not_convert": ["q_proj"]}, "q_proj is stored plain, and the others are not"),
    ],
)
def test_what_cannot_be_read_is_refused(
    checkpoints: Checkpoints, tmp_path: Path, change: dict[str, Any], found: str
) -> None:
    """By the name of the field, or of the layer."""
    stored, _ = write(checkpoints("LlamaForCausalLM", **SIZES), tmp_path, CASES["awq"])
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] |= change
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=found):
        LLM(model=stored, dtype="float32", **SETTINGS)


def test_a_missing_scale_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    stored, _ = write(checkpoints("LlamaForCausalLM", **SIZES), tmp_path, CASES["awq"])
    tensors = load_file(stored / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.scales"]
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(EngineError, match=r"1 missing: model\.layers\.0\.self_attn\.q_proj\.scales"):
        LLM(model=stored, dtype="float32", **SETTINGS)


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "one for both ends"])
def test_adapters(checkpoints: Checkpoints, tmp_path: Path, tied: bool) -> None:
    """Of packed layers, of a head that is packed or the plain embedding, and of that: each as the numbers with its
    products in them, all in one batch."""
    pytest.importorskip("engine_lora", reason="engine-lora is not installed")
    sys.path.append(str(Path(__file__).parents[2] / "lora" / "tests"))
    from small_adapters import EMBEDDING, HEAD, write_pairs

    from engine_lora import LoRARequest

    case = with_default_head(CASES["awq"])
    stored, plain = write(checkpoints("LlamaForCausalLM", tie=tied, **SIZES), tmp_path, case)
    numbers = load_file(plain / "model.safetensors")
    numbers.setdefault(f"{HEAD}.weight", numbers[f"{EMBEDDING}.weight"])
    config = json.loads((plain / "config.json").read_text()) | {"tie_word_embeddings": False}
    vocabulary, hidden = numbers[f"{EMBEDDING}.weight"].shape
    ends = {EMBEDDING: (hidden, vocabulary), HEAD: (vocabulary, hidden)}
    inner = ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj")
    targets = ({EMBEDDING: ends[EMBEDDING]}, {HEAD: ends[HEAD]},
               ends | {name: tuple(numbers[f"{name}.weight"].shape) for name in inner})  # fmt: skip
    requests, expected = [], []
    for number, modules in enumerate(targets):
        changes = write_pairs(tmp_path / f"a{number}", number, modules)
        requests.append(LoRARequest(f"a{number}", 0, tmp_path / f"a{number}"))
        shutil.copytree(plain, tmp_path / f"merged{number}")
        (tmp_path / f"merged{number}" / "config.json").write_text(json.dumps(config))
        changed = {name: x.double() + changes.get(name.removesuffix(".weight"), 0) for name, x in numbers.items()}
        save_file(changed, tmp_path / f"merged{number}" / "model.safetensors")
        expected.append(answers(tmp_path / f"merged{number}", dtype="float64"))

    def adapted(dtype: str) -> list[Any]:
        given = SETTINGS | {"adapter": "lora", "adapter.max_loras": 3, "adapter.max_lora_rank": 4, "max_num_seqs": 8}
        with LLM(model=stored, dtype=dtype, **given) as llm:
            each = [request for request in requests for _ in TEXTS]
            return llm.generate(TEXTS * len(requests), GREEDY, lora_request=each, use_tqdm=False)

    exact = adapted("float64")
    assert tokens(exact) == [ids for outputs in expected for ids in tokens(outputs)]
    assert len(set(tokens(exact))) == len(exact), "an adapter changes nothing"
    near = np.abs(scores(adapted("float32")) - scores(exact)).mean()
    assert near < 2 * NEAR, "of log probabilities down to -40"
