"""Cards of tokenizers that are faulty themselves. Light, as cards are."""

from __future__ import annotations

from pathlib import Path

from engine.interfaces.tokenizer import TokenizerNeed
from engine_reference.tokenizer_hf.card import HFTokenizer


class OpensAnything(HFTokenizer):
    """the card claims to serve folders without a tokenizer"""

    @classmethod
    def unsupported(cls, need: TokenizerNeed) -> list[str]:
        return []


class Undecided(HFTokenizer):
    """the card answers otherwise when it is asked again"""

    asked = 0

    @classmethod
    def unsupported(cls, need: TokenizerNeed) -> list[str]:
        if Path(need.folder).is_dir():
            return []
        cls.asked += 1
        return [f"asked {cls.asked} times"]


CARDS = [OpensAnything, Undecided]
