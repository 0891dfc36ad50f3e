"""A card that is no light one."""

import torch
from plain_cards import PlainAttention

from engine.interfaces.attention import AttentionNeed


class Heavy(PlainAttention):
    """the card imports torch"""

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        return super().unsupported(need) if hasattr(torch, need.dtype) else [f"torch has no dtype {need.dtype}"]
