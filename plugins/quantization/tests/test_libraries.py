"""Layers and models that the formats' own libraries write, beside what these libraries make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import Checkpoints
from safetensors.torch import load_file
from test_engine import SETTINGS, SIZES, TEXTS, tokens

from engine import LLM, SamplingParams
from engine.interfaces.quantization import LayerShape
from engine.types.parallel import Shard
from engine_quantization.body import Kept, TorchBody
from engine_quantization.methods import method_of


class _Context:
    def __init__(self, stored: dict[str, Any]) -> None:
        config = type("Model", (), {"config": {"quantization_config": stored}})
        self.start = type("Start", (), {"model": config})


def read(stored: dict[str, Any], tensors: dict[str, torch.Tensor], outputs: int, inputs: int) -> torch.Tensor:
    """The weight [O, I] of a layer named "layer", float64."""
    body = TorchBody(_Context(stored))  # type: ignore[arg-type]
    layer = LayerShape(("layer",), "linear", Shard.of(inputs), (Shard.of(outputs),), False)
    asked = body.tensors(layer)
    assert {one.name for one in asked} == set(tensors), "other tensors than the library writes"
    for one in asked:
        assert one.shape in (tuple(tensors[one.name].shape) or (1,), (-1,)), one.name
        assert str(tensors[one.name].dtype).removeprefix("torch.") in one.dtypes, one.name
    packed: Kept = body.pack(layer, {one.key: torch.atleast_1d(tensors[one.name]) for one in asked})
    return packed.weight(slice(None), torch.float64)


def weight(outputs: int = 64, inputs: int = 256) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))


NUMBERS = {
    "w4 group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}),
    "w4 asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "w4 channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "w8 group": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64}),
    "w8 channel": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "w8 asymmetric": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "int8 group": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64}),
    "int8 channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "int8 asymmetric": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "fp8 channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
    ),
}


def ends(plain: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest number of all that share a scale."""
    if args.strategy == "group":
        parts = plain.unflatten(1, (-1, args.group_size))
        return parts.amin(-1), parts.amax(-1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        parts = plain.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return parts.amin((1, 3)), parts.amax((1, 3))
    if args.strategy == "channel":
        return plain.amin(1, keepdim=True), plain.amax(1, keepdim=True)
    return plain.min().view(1), plain.max().view(1)


@pytest.mark.parametrize("name", NUMBERS)
def test_layers_of_compressed_tensors(name: str) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    form, numbers = NUMBERS[name]
    args, plain = QuantizationArgs(**numbers), weight()
    scale, zero = calculate_qparams(*ends(plain, args), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    state = {"weight": plain, "weight_scale": scale, "weight_zero_point": zero}
    made = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(made), scheme)["weight"]
    stored = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    found = read(stored, {f"layer.{key}": tensor for key, tensor in made.items()}, *plain.shape)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0)
    assert (found - plain).abs().mean() < 0.15


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("values", ["nf4", "fp4"])
def test_4_bit_layers_of_bitsandbytes(values: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    plain = weight(96, 256)
    packed, state = functional.quantize_4bit(plain, quant_type=values, compress_statistics=nested, blocksize=64)
    tensors = {f"layer.weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    stored = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": values,
        "bnb_4bit_use_double_quant": nested,
    }  # fmt: skip
    found = read(stored, {"layer.weight": packed, **tensors}, *plain.shape)
    torch.testing.assert_close(found, functional.dequantize_4bit(packed, state).double(), rtol=1e-5, atol=1e-7)


def test_8_bit_layers_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    plain = weight()
    codes, scales, _ = functional.int8_vectorwise_quant(plain.half())
    tensors = {"layer.weight": codes, "layer.SCB": scales, "layer.weight_format": torch.tensor(0, dtype=torch.uint8)}
    found = read({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, *plain.shape)
    torch.testing.assert_close(found, functional.int8_vectorwise_dequant(codes, scales).double(), rtol=1e-5, atol=1e-6)


def test_experts_of_gpt_oss_as_transformers_widens_them() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from engine_quantization.readers import READERS

    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 64, 4, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(100, 140, (3, 64, 4), dtype=torch.uint8, generator=random)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, in, out]
    form = method_of({"quant_method": "mxfp4"}).form("model.layers.0.mlp.experts.down_proj", "expert")
    assert form is not None
    layer = LayerShape(("layer",), "expert", Shard.of(128), (Shard.of(64),), False)
    for expert in range(3):
        codes = READERS["mxfp4"].codes(layer, form, {"blocks": blocks[expert], "scales": scales[expert]})
        assert codes.values is not None
        found = codes.values[codes.codes.long()] * codes.scales.float().repeat_interleave(32, 1)
        assert torch.equal(found, expected[expert].T)


@pytest.mark.parametrize(
    "scheme",
    ["W4A16_ASYM", "FP8_BLOCK", *(pytest.param(s, marks=pytest.mark.slow) for s in
     ("W4A16", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8"))],
)  # fmt: skip
def test_a_model_that_compressed_tensors_writes(checkpoints: Checkpoints, tmp_path: Path, scheme: str) -> None:
    """By its preset schemes, config.json and all; the oracle is transformers with what the library decompresses."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    folder = checkpoints("LlamaForCausalLM", **SIZES)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = QuantizationConfig(config_groups={scheme: ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if (named := getattr(module, "quantization_scheme", None)) is not None:
            scale, zero = calculate_qparams(*ends(module.weight.data, named.weights), named.weights)
            module.weight_scale.data.copy_(scale)
            module.weight_zero_point.data.copy_(zero)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.05)
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    compressor.decompress_model(model)
    wide = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    given = {name: tensor.double() for name, tensor in model.state_dict().items() if name in wide.state_dict()}
    wide.load_state_dict(given)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "compressed-tensors" and written["ignore"] == ["lm_head"]
    first = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(given[first], load_file(folder / "model.safetensors")[first].double()), "nothing is rounded"
    expected = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = wide.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        expected.append(tuple(out[0, ids.shape[1] :].tolist()))
    with LLM(model=tmp_path, dtype="float64", **SETTINGS) as llm:
        found = llm.generate(TEXTS, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert tokens(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_that_transformers_saves_by_bitsandbytes(checkpoints: Checkpoints, tmp_path: Path, bits: int) -> None:
    """Saved on a processor, and served as it lies there."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    how: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:
        how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints("LlamaForCausalLM", **SIZES), device_map="cpu", dtype=torch.float32,
        quantization_config=transformers.BitsAndBytesConfig(**how),
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints("LlamaForCausalLM", **SIZES))
    tokenizer.save_pretrained(tmp_path)
    wide = model.dequantize(dtype=torch.float32).double()
    expected = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        given = wide.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        expected.append(tuple(given[0, ids.shape[1] :].tolist()))
    with LLM(model=tmp_path, dtype="float64", **SETTINGS) as llm:
        found = llm.generate(TEXTS, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert tokens(found) == expected
