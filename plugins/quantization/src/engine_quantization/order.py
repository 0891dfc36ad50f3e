"""Inputs whose groups do not follow one another, put group by group."""

from __future__ import annotations

import torch

from engine.interfaces.quantization import LayerShape
from engine.types.errors import ConfigError
from engine_quantization.readers import Codes

PART = 32
"""Inputs of a piece of a group that is not whole."""
ELSEWHERE = "name the slower driver that takes it, by --quantization stored, or choose a smaller --tensor-parallel-size"


def in_order(codes: Codes) -> tuple[Codes, torch.Tensor | None]:
    """Inputs that are put group by group, and which input of a row comes where; None: as they stand.

    Where a rank has parts of groups, these are cut into pieces of `PART` inputs: the last one of a group is filled up
    with its last input, by weights of 0.
    """
    if codes.group_of is None:
        return codes, None
    assert codes.zeros is not None
    order = torch.argsort(codes.group_of, stable=True)
    counts = torch.bincount(codes.group_of, minlength=codes.scales.shape[1])
    if not bool((counts[:-1] != codes.group_size).any()):
        return codes._replace(codes=codes.codes[:, order], group_of=None), order
    pieces, device = -(-counts // PART), counts.device
    of_piece = torch.repeat_interleave(torch.arange(len(counts), device=device), pieces)
    firsts = torch.cumsum(counts, 0) - counts  # of each group's inputs among all that are sorted
    pieces_before = torch.cumsum(pieces, 0) - pieces
    within = torch.arange(len(of_piece), device=device) - pieces_before[of_piece]
    inside = within.unsqueeze(1) * PART + torch.arange(PART, device=device)
    there = (inside < counts[of_piece].unsqueeze(1)).flatten()
    at = torch.minimum(inside, counts[of_piece].unsqueeze(1) - 1) + firsts[of_piece].unsqueeze(1)
    order, scales, zeros = order[at.flatten()], codes.scales[:, of_piece], codes.zeros[:, of_piece]
    filled = torch.where(there, codes.codes[:, order], zeros.repeat_interleave(PART, 1))
    return Codes(filled, codes.bits, scales, zeros, None, PART), order


def refused(layer: LayerShape, why: str) -> ConfigError:
    return ConfigError(f"multiply with {', '.join(layer.names)} as it is stored", why, ELSEWHERE)
