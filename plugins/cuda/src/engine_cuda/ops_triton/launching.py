"""Sizes of launches."""

from __future__ import annotations


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
