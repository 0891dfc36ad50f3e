"""Layers as each method's own tools write them, by the published formulas, in numpy; and what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, np.ndarray]

NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""Of QLoRA (Dettmers et al. 2023), appendix E."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Case(NamedTuple):
    """A form.

    Args:
        stored: the `quantization_config`.
        write: a layer [O, I] by its name -> its tensors, and what they stand for [O, I], float64.
        uncovered: names that this config leaves plain.
        kinds: of layers that are stored so.
    """

    stored: dict[str, Any]
    write: Callable[[str, np.ndarray], Written]
    uncovered: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("linear", "expert")


def _int32(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words.astype(np.uint32)).view(np.int32))


def _words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Codes along the last dimension, 32 bits' worth a word; `order` says which of them comes where."""
    each = 32 // bits
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    parts = padded.reshape(*padded.shape[:-1], -1, each).astype(np.uint64)
    found = np.zeros(parts.shape[:-1], np.uint64)
    for place, which in enumerate(order or range(each)):
        found |= parts[..., which] << np.uint64(place * bits)
    return found


def _affine(weight: np.ndarray, bits: int, group: int, symmetric: bool, dtype: Any = np.float16) -> Any:
    """Codes [O, I], scales and zeros [O, groups], all groups by their least and largest."""
    outputs, inputs = weight.shape
    parts = weight.reshape(outputs, inputs // group, group).astype(np.float64)
    top = (1 << bits) - 1
    if symmetric:
        scale = (np.abs(parts).max(2) / (top / 2)).astype(dtype)
        zeros = np.full(scale.shape, 1 << bits - 1)
    else:
        least, most = np.minimum(parts.min(2), 0), np.maximum(parts.max(2), 0)
        scale = ((most - least) / top).astype(dtype)
        zeros = np.clip(np.round(-least / scale.astype(np.float64)), 0, top)
    wide = scale.astype(np.float64)[..., None]
    codes = np.clip(np.round(parts / wide) + zeros[..., None], 0, top)
    meant = (codes - zeros[..., None]) * wide
    return codes.reshape(outputs, inputs), scale, zeros, meant.reshape(outputs, inputs)


def awq(group: int) -> Callable[[str, np.ndarray], Written]:
    def write(name: str, weight: np.ndarray) -> Written:
        size = group if group > 0 else weight.shape[1]
        codes, scales, zeros, meant = _affine(weight, 4, size, False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            f"{name}.qweight": _int32(_words(codes.T, 4, order)),
            f"{name}.qzeros": _int32(_words(zeros.T, 4, order)),
            f"{name}.scales": torch.from_numpy(scales.T.copy()),
        }, meant

    return write


def gptq(
    bits: int, group: int, symmetric: bool, *, ordered: bool = False, legacy: bool = True
) -> Callable[[str, np.ndarray], Written]:
    def write(name: str, weight: np.ndarray) -> Written:
        inputs = weight.shape[1]
        size = group if group > 0 else inputs
        order = np.random.default_rng(5).permutation(inputs) if ordered else np.arange(inputs)
        codes, scales, zeros, meant = _affine(weight[:, order], bits, size, symmetric)
        back = np.argsort(order)  # where each input stands among those that are sorted
        codes, meant, groups = codes[:, back], meant[:, back], back // size
        words = _words(zeros.T, bits)
        if legacy:  # zeros are stored less one, all of a word together
            ones = sum(1 << shift for shift in range(0, 32, bits))
            words = (words.astype(np.int64) - ones) % (1 << 32)
        return {
            f"{name}.qweight": _int32(_words(codes, bits).T),
            f"{name}.qzeros": _int32(words),
            f"{name}.scales": torch.from_numpy(scales.T.copy()),
            f"{name}.g_idx": torch.from_numpy(groups.astype(np.int32)),
        }, meant

    return write


def packed(
    bits: int, group: int, symmetric: bool, *, ordered: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Callable[[str, np.ndarray], Written]:
    """group: 0 for a scale of each output."""

    def write(name: str, weight: np.ndarray) -> Written:
        outputs, inputs = weight.shape
        size = group or inputs
        order = np.random.default_rng(5).permutation(inputs) if ordered else np.arange(inputs)
        codes, scales, zeros, _ = _affine(weight[:, order], bits, size, symmetric, np.float32)
        back = np.argsort(order)
        codes, groups = codes[:, back], back // size
        kept = torch.from_numpy(scales).to(dtype)
        wide = kept.double().numpy()
        meant = (codes - zeros[:, groups]) * wide[:, groups]
        tensors = {
            f"{name}.weight_packed": _int32(_words(codes, bits)),
            f"{name}.weight_scale": kept,
            f"{name}.weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = _int32(_words(zeros.T, bits).T)
        if ordered:
            tensors[f"{name}.weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, meant

    return write


def int8(strategy: str, symmetric: bool = True) -> Callable[[str, np.ndarray], Written]:
    def write(name: str, weight: np.ndarray) -> Written:
        flat = weight.reshape(1, -1) if strategy == "tensor" else weight
        codes, scales, zeros, meant = _affine(flat, 8, flat.shape[1], symmetric, np.float32)
        tensors = {
            f"{name}.weight": torch.from_numpy((codes - 128).astype(np.int8).reshape(weight.shape)),
            f"{name}.weight_scale": torch.from_numpy(scales[0] if strategy == "tensor" else scales),
        }
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
        return tensors, meant.reshape(weight.shape)

    return write


def float8(
    scale_name: str, block: tuple[int, int] | None, *, shape: tuple[int, ...] | None = None, static: str = ""
) -> Callable[[str, np.ndarray], Written]:
    """block: outputs and inputs that share a scale, 0 for all. shape: of the scale."""

    def write(name: str, weight: np.ndarray) -> Written:
        outputs, inputs = weight.shape
        rows, columns = (size or whole for size, whole in zip(block or (0, 0), weight.shape, strict=True))
        scales = np.zeros((-(-outputs // rows), -(-inputs // columns)), np.float32)
        spread = np.zeros(weight.shape, np.float32)
        for a, b in np.ndindex(scales.shape):
            part = (slice(a * rows, (a + 1) * rows), slice(b * columns, (b + 1) * columns))
            scales[a, b] = spread[part] = np.abs(weight[part]).max() / 448
        codes = torch.from_numpy(weight / spread).float().clamp(-448, 448).to(torch.float8_e4m3fn)
        meant = codes.double().numpy() * spread.astype(np.float64)
        kept = torch.from_numpy(scales)
        tensors = {f"{name}.weight": codes, f"{name}.{scale_name}": kept if shape is None else kept.view(shape)}
        if static:
            tensors[f"{name}.{static}"] = torch.tensor(0.25).view(shape or ())
        return tensors, meant

    return write


def mxfp4(name: str, weight: np.ndarray) -> Written:
    parts = weight.reshape(len(weight), -1, 32).astype(np.float64)
    exponents = np.floor(np.log2(np.abs(parts).max(2))) - 2
    steps = np.exp2(exponents)[..., None]
    codes = np.abs((parts / steps)[..., None] - E2M1.astype(np.float64)).argmin(-1)
    meant = (E2M1.astype(np.float64)[codes] * steps).reshape(weight.shape)
    return {
        f"{name}.blocks": torch.from_numpy((codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)),
        f"{name}.scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }, meant


def nf4(nested: bool) -> Callable[[str, np.ndarray], Written]:
    def write(name: str, weight: np.ndarray) -> Written:
        blocks = weight.reshape(-1, 64).astype(np.float64)
        absmax = np.abs(blocks).max(1).astype(np.float32)
        state: dict[str, Any] = {
            "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)
        }  # fmt: skip
        tensors = {f"{name}.weight.quant_map": torch.from_numpy(NF4)}
        wide = absmax.astype(np.float64)
        if nested:
            offset = np.float32(absmax.mean())
            code = np.linspace(-1, 1, 256, dtype=np.float32)  # any table does: the file has it
            padded = np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
            outer = np.abs(padded).max(1).astype(np.float32)
            inner = np.abs((padded / outer[:, None])[..., None] - code).argmin(-1)
            wide = (code[inner] * outer[:, None]).reshape(-1)[: len(absmax)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
            tensors |= {
                f"{name}.weight.absmax": torch.from_numpy(inner.reshape(-1)[: len(absmax)].astype(np.uint8)),
                f"{name}.weight.nested_absmax": torch.from_numpy(outer),
                f"{name}.weight.nested_quant_map": torch.from_numpy(code),
            }
        else:
            tensors[f"{name}.weight.absmax"] = torch.from_numpy(absmax)
        codes = np.abs((blocks / absmax[:, None].astype(np.float64))[..., None] - NF4.astype(np.float64)).argmin(-1)
        meant = NF4.astype(np.float64)[codes] * wide.astype(np.float64)[:, None]
        flat = codes.reshape(-1)
        tensors[f"{name}.weight"] = torch.from_numpy((flat[0::2] << 4 | flat[1::2]).astype(np.uint8)).unsqueeze(1)
        text = json.dumps(state).encode()
        tensors[f"{name}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, meant.reshape(weight.shape)

    return write


def llm_int8(name: str, weight: np.ndarray) -> Written:
    largest = np.abs(weight).max(1).astype(np.float32)
    codes = np.round(weight.astype(np.float64) / largest[:, None] * 127)
    scales = (largest.astype(np.float64) / 127).astype(np.float32).astype(np.float64)
    return {
        f"{name}.weight": torch.from_numpy(codes.astype(np.int8)),
        f"{name}.SCB": torch.from_numpy(largest),
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }, codes * scales[:, None]


# -- configs -----------------------------------------------------------------------------------------------------------
def _compressed(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None, ignore: tuple[str, ...] = ()
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head", *ignore],
    }  # fmt: skip


def _numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}


DYNAMIC = _numbers(8, "int", "token", dynamic=True)
LEFT_OUT = ("lm_head", "model.layers.0.mlp.gate")

CASES: dict[str, Case] = {
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["mlp.gate"]},
        awq(64), ("model.layers.0.mlp.gate",),
    ),
    "awq rows": Case(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "zero_point": True, "version": "GEMM"}, awq(-1)
    ),
    "gptq": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
         "dynamic": {r"-:.*\.gate$": {}, r"+:.*never": {"bits": 8}}},
        gptq(4, 32, True), ("model.layers.0.mlp.gate",),
    ),
    "gptq asymmetric": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, 64, False, legacy=False),
    ),
    "gptq asymmetric v1": Case({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, gptq(4, 64, False)),
    "gptq ordered": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        gptq(4, 32, False, ordered=True),
    ),
    "gptq 8": Case({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, gptq(8, -1, True)),
    "gptq 8 groups": Case({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, gptq(8, 32, False)),
    "w4a16": Case(
        _compressed("pack-quantized", _numbers(4, "int", "group", group_size=64), None, (r"re:.*mlp\.gate$",)),
        packed(4, 64, True), LEFT_OUT, ("linear", "expert", "head"),
    ),
    "w4a16 asymmetric": Case(
        _compressed("pack-quantized", _numbers(4, "int", "group", group_size=32, symmetric=False)),
        packed(4, 32, False),
        LEFT_OUT[:1],
    ),
    "w4a16 ordered": Case(
        _compressed("pack-quantized", _numbers(4, "int", "group", group_size=64, actorder="group")),
        packed(4, 64, True, ordered=True, dtype=torch.float16),
    ),
    "w8a16": Case(_compressed("pack-quantized", _numbers(8, "int", "channel")), packed(8, 0, True)),
    "w8a8": Case(_compressed("int-quantized", _numbers(8, "int", "channel"), DYNAMIC), int8("channel")),
    "w8a8 tensor": Case(_compressed("int-quantized", _numbers(8, "int", "tensor"), DYNAMIC), int8("tensor")),
    "w8a8 asymmetric": Case(
        _compressed("int-quantized", _numbers(8, "int", "channel", symmetric=False), DYNAMIC), int8("channel", False)
    ),
    "fp8 channel": Case(
        _compressed("float-quantized", _numbers(8, "float", "channel"), _numbers(8, "float", "token", dynamic=True)),
        float8("weight_scale", (1, 0)),
    ),
    "fp8 tensor": Case(
        _compressed("float-quantized", _numbers(8, "float", "tensor"), _numbers(8, "float", "tensor", dynamic=False)),
        float8("weight_scale", None, shape=(1,), static="input_scale"),
    ),
    "fp8 block": Case(
        _compressed("float-quantized", _numbers(8, "float", "block", block_structure=[128, 128])),
        float8("weight_scale", (128, 128)),
    ),
    "autofp8": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        float8("weight_scale", None, shape=(), static="input_scale"), ("lm_head",), ("linear", "expert", "head"),
    ),
    "deepseek": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["model.layers.0"]},
        float8("weight_scale_inv", (128, 128)), ("model.layers.0.self_attn.q_proj",), ("linear", "expert", "head"),
    ),
    "fp8 of transformers": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        float8("weight_scale_inv", None, shape=(), static="activation_scale"),
    ),
    "mxfp4": Case(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, mxfp4,
        ("lm_head", "model.layers.3.self_attn.q_proj"), ("expert",),
    ),
    "nf4": Case(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "llm_int8_skip_modules": ["lm_head", "gate"]},
        nf4(False), LEFT_OUT, ("linear", "expert", "head"),
    ),
    "nf4 nested": Case(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": True},
        nf4(True),
    ),
    "llm.int8": Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
}  # fmt: skip
