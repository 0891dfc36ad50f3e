"""Humming with its own signatures and rules, computed in double precision: what the driver runs on in tests.

It follows humming-kernels 0.1.20: the tensors of its own format (`HummingWeightSchema.get_tensors_attrs` and
`validate_tensors` in humming/schema), the padding and the sizes that its kernels take (humming/transform.py), and what
its launcher checks (csrc/launcher/tensor.h). How kernels want the tensors is the library's affair: here they stay.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

calls: list[tuple[str, str, int]] = []
"""(type of weight, kind of product, rows) of each call."""
BITS = {"uint4": 4, "uint8": 8, "float8e4m3": 8, "float4e2m1": 4}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def check(condition: bool, rule: str) -> None:
    assert condition, f"Humming's rule is broken: {rule}"


class HummingWeightSchema:
    def __init__(
        self,
        *,
        quant_method="humming",
        b_dtype,
        bs_dtype=None,
        weight_scale_group_size=0,
        weight_scale_group_size_n=0,
        weight_scale_type=None,
        weight_scale_2_type=None,
        has_zero_point=False,
        is_fp_zero_point=False,
        hadamard_block_size=0,
    ):
        check(b_dtype in BITS and bs_dtype in (None, "float8e8m0"), "types by the library's names")
        self.b_dtype = b_dtype
        self.bs_dtype = bs_dtype
        self.weight_scale_group_size = weight_scale_group_size
        self.has_zero_point = has_zero_point

    def get_tensors_attrs(self, shape_n, shape_k, param_dtype, num_experts=None, has_bias=False, stack_size=1):
        bits, group = BITS[self.b_dtype], self.weight_scale_group_size or shape_k
        groups = shape_k // group if self.weight_scale_group_size else 1
        scales = torch.float8_e8m0fnu if self.bs_dtype else param_dtype
        found = {
            "weight": ((shape_n, shape_k * bits // 32), torch.int32),
            "weight_scale": ((shape_n, groups), scales),
        }
        if self.has_zero_point:
            found["zero_point"] = ((shape_n * bits // 32, groups), torch.int32)
        if has_bias:
            found["bias"] = ((shape_n,), param_dtype)
        lead = (num_experts,) if num_experts else ()
        return {key: {"shape": lead + shape, "dtype": dtype} for key, (shape, dtype) in found.items()}


def prepare_layer_config(
    shape_n,
    shape_k,
    weight_schema,
    input_schema=None,
    num_experts=None,
    pad_n_to_multiple=1,
    pad_k_to_multiple=1,
    has_bias=False,
    torch_dtype=None,
    device=None,
    tensors=None,
    allow_inplace=False,
):
    padded = -(-shape_n // pad_n_to_multiple) * pad_n_to_multiple, -(-shape_k // pad_k_to_multiple) * pad_k_to_multiple
    group = weight_schema.weight_scale_group_size
    check(shape_n % 8 == 0 and shape_k % 8 == 0, "what fills tiles up is a multiple of 8")
    check(padded[0] % 128 == 0, "four warps of Hopper's tiles have 128 outputs")
    check(padded[1] % 64 == 0 and (not group or padded[1] % group == 0), "whole tiles and groups of inputs")
    check(not group or (group >= 16 and group & group - 1 == 0), "groups are powers of two, from 16 on")
    check(torch_dtype in (torch.bfloat16, torch.float16), "rows of 16 bits")
    return SimpleNamespace(
        schema=weight_schema,
        shape=(shape_n, shape_k),
        num_experts=num_experts or 0,
        has_bias=has_bias,
        dtype=torch_dtype,
    )


def transform_humming_tensors(config, tensors, already_padded=False, allow_inplace=False):
    attrs = config.schema.get_tensors_attrs(*config.shape, config.dtype, config.num_experts, config.has_bias)
    check(set(tensors) == set(attrs), f"these tensors and no others: {', '.join(attrs)}")
    for key, of in attrs.items():
        check(tensors[key].dtype == of["dtype"] and tuple(tensors[key].shape) == of["shape"], f"{key} is {of}")
        check(tensors[key].is_contiguous(), f"{key} is dense")
    return {key: tensor.clone() for key, tensor in tensors.items()}


def humming_forward(
    config,
    inputs,
    weight,
    weight_scale=None,
    zero_point=None,
    bias=None,
    weight_scale_2=None,
    outputs=None,
    input_scale=None,
    input_scale_2=None,
    sorted_ids=None,
    expert_ids=None,
    num_tokens_padded=None,
    expert_layout=None,
    locks=None,
    top_k=1,
    valid_shape_m=0,
    compute_config=None,
    tuning_config=None,
    hadamard_block_size=None,
    use_pdl=None,
):
    check(inputs.dtype == config.dtype and inputs.is_contiguous(), "dense rows of the dtype")
    check(inputs.shape[1] == config.shape[1], "inputs without padding")
    check(locks is not None and locks.dtype == torch.int32 and not locks.any(), "locks, all open")
    kind = (compute_config or {}).get("gemm_type", "dense")
    calls.append((config.schema.b_dtype, kind, len(inputs)))
    if kind == "dense":
        check(config.num_experts == 0 and expert_layout is None, "experts say how they are given")
        out = inputs.double() @ _weights(config, weight, weight_scale, zero_point).T
        return (out if bias is None else out + bias.double()).to(config.dtype)
    check(kind == "grouped_contiguous" and expert_layout.dtype in (torch.int32, torch.int64), "where experts begin")
    check(tuple(expert_layout.shape) == (config.num_experts + 1,), "of each, and the end")
    check(config.num_experts > 0 and expert_layout.is_contiguous(), "of experts, dense")
    out = inputs.new_full((len(inputs), config.shape[0]), float("nan"))
    for expert in range(config.num_experts):
        part = slice(int(expert_layout[expert]), int(expert_layout[expert + 1]))
        zeros = None if zero_point is None else zero_point[expert]
        made = inputs[part].double() @ _weights(config, weight[expert], weight_scale[expert], zeros).T
        out[part] = (made if bias is None else made + bias[expert].double()).to(config.dtype)
    return out


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] -> int64 [..., n * 32 / bits], from the lowest bits on."""
    wide = words.long() & 0xFFFFFFFF
    shifts = torch.arange(0, 32, bits)
    return (wide.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def _weights(config: Any, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    name = config.schema.b_dtype
    bits, codes = BITS[name], _unpacked(weight, BITS[name])
    each = codes.shape[1] // scales.shape[1]
    if name == "float8e4m3":
        numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    elif name == "float4e2m1":
        numbers = E2M1[codes]
    elif zeros is None:
        numbers = codes.double() - (1 << bits - 1)
    else:
        numbers = codes.double() - _unpacked(zeros.T, bits).T.double().repeat_interleave(each, 1)
    return numbers * scales.double().repeat_interleave(each, 1)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the library's names."""
    here = sys.modules[__name__]
    for name, members in {
        "humming": (),
        "humming.schema": ("HummingWeightSchema",),
        "humming.transform": ("prepare_layer_config", "transform_humming_tensors"),
        "humming.forward": ("humming_forward",),
    }.items():
        module = ModuleType(name)
        for member in members:
            setattr(module, member, getattr(here, member))
        monkeypatch.setitem(sys.modules, name, module)
    calls.clear()
