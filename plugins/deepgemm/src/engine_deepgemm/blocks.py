"""Stored weights as DeepGEMM takes them: whole blocks of 128 x 128, with zeros where a part fills none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine_quantization.readers import Codes

BLOCK = 128


def in_blocks(codes: Codes, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer whose parts have `lengths` outputs, in the order in which they are stored.

    Returns:
        codes uint8 [N, K], both multiples of 128: each part begins with a block of its own.
        scales float32 [N / 128, K / 128].
        int64 [O]: where each output stands among the N.
    """
    parts, scales, places, start, first = [], [], [], 0, 0
    wider = -codes.codes.shape[1] % BLOCK
    for length in lengths:
        more = -length % BLOCK
        parts.append(F.pad(codes.codes[start : start + length], (0, wider, 0, more)))
        scales.append(codes.scales[start : start + length : BLOCK].float())
        places.append(torch.arange(first, first + length, device=codes.codes.device))
        start += length
        first += length + more
    return torch.cat(parts), torch.cat(scales), torch.cat(places)


def powers_of_two(scales: torch.Tensor) -> bool:
    """Whether all of them are: float32 without anything behind the point."""
    return not bool((scales.contiguous().view(torch.int32) & 0x7FFFFF).any())
