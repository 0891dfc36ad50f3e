"""Philox4x32-10 in torch's int64 arithmetic: the numbers of `engine_kit.philox`, on any device."""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def uniform(seed: torch.Tensor, position: torch.Tensor, purpose: int) -> torch.Tensor:
    """The engine's random numbers: float64 [n] in [0, 1).

    seed int64 [n] (the bits of the uint64), position int64 [n]. The four counter words are held as two pairs, the
    (c0, c2) that are multiplied and the (c1, c3) that are mixed in, so that a round is a handful of operations. Each
    round swaps the words of a pair; the multiplied pair is left swapped in every other round instead. int64 products
    wrap, and their high halves come from an arithmetic shift whose surplus bits are masked away afterwards.
    """
    device = seed.device
    multipliers = _constants((*_MULTIPLIERS, *_MULTIPLIERS[::-1]), device).view(2, 2, 1).unbind()
    weyl = _constants((*_WEYL[::-1], *_WEYL), device).view(2, 2, 1).repeat(_ROUNDS // 2, 1, 1)
    low, high = seed & _LOW, (seed >> 32) & _LOW
    key = torch.stack((high, low, low, high)).view(2, 2, -1).repeat(_ROUNDS // 2, 1, 1)
    keys = (key + weyl * torch.arange(_ROUNDS, device=device).view(-1, 1, 1)).unbind()
    multiplied = torch.stack((position & _LOW, torch.zeros_like(position)))
    mixed = _constants((0, purpose), device).view(2, 1)
    product = multiplied
    for number in range(_ROUNDS):
        product = multiplied * multipliers[number % 2]
        multiplied = (product >> 32).bitwise_xor_(mixed).bitwise_xor_(keys[number]).bitwise_and_(_LOW)
        mixed = product.flip(0)
    x0, x1 = multiplied[0], product[0] & _LOW  # unswapped, after an even number of rounds
    return ((x0 >> 5) * 2**26 + (x1 >> 6)).double() / 2**53


def _constants(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 [n]; made on the device, as a copy from the host would wait for it."""
    if device.type == "cpu":
        return torch.tensor(values)
    return torch.stack([torch.full((), value, dtype=torch.int64, device=device) for value in values])
