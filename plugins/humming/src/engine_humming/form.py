"""Stored weights as Humming's own format has them: codes along the inputs from the lowest bits of a word on, scales in
the dtype of activations, and codes for zero along the outputs likewise."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine_quantization.readers import Codes


class Scheme(NamedTuple):
    """What the library is told of a layer; its tensors follow from it.

    Args:
        dtype: of a weight, by the library's name.
        scale_dtype: likewise; "": of activations.
        group: inputs that share a scale; 0: all of an output's.
        zeros: whether codes for zero are stored.
    """

    dtype: str
    scale_dtype: str
    group: int
    zeros: bool


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] -> int32 [..., n * bits / 32], the first code in the lowest bits."""
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    flat = codes.contiguous().flatten()  # of one row, strides may say anything
    return flat.view(torch.int32).unflatten(0, (*codes.shape[:-1], -1))


def symmetric(codes: Codes) -> bool:
    """Whether 0 is the middle code everywhere, which the library then takes it for."""
    return codes.zeros is None or bool((codes.zeros == 1 << codes.bits - 1).all())


def in_form(
    codes: Codes, dtype: torch.dtype, powers_of_two: bool = False, zeros: bool | None = None
) -> tuple[Scheme, dict[str, torch.Tensor]]:
    """A layer's scheme and tensors: "weight" int32 [O, I * bits / 32], "weight_scale" [O, groups], and with zeros
    "zero_point" int32 [O * bits / 32, groups].

    Args:
        dtype: of activations.
        powers_of_two: scales are, in bfloat16 (MXFP4): they stay exponents of 8 bits.
        zeros: whether to keep codes for zero; None: where the middle one does not stand for it.
    """
    inputs = codes.codes.shape[1]
    group = 0 if codes.scales.shape[1] == 1 else codes.group_size
    tensors = {"weight": words(codes.codes, codes.bits)}
    scales = codes.scales.contiguous()
    if powers_of_two:
        exponents = (scales.bfloat16().view(torch.int16).int() >> 7) & 255
        tensors["weight_scale"] = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
        return Scheme("float4e2m1", "float8e8m0", group or inputs, False), tensors
    tensors["weight_scale"] = scales.to(dtype)
    if codes.values is not None:
        return Scheme("float8e4m3", "", group, False), tensors
    kept = not symmetric(codes) if zeros is None else zeros
    if kept:
        assert codes.zeros is not None
        tensors["zero_point"] = words(codes.zeros.T.contiguous(), codes.bits).T.contiguous()
    return Scheme(f"uint{codes.bits}", "", group, kept), tensors
