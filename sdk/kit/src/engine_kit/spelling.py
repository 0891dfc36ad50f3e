"""Whether a vocabulary can spell a text: for grammar drivers, which refuse what no output could be."""

from __future__ import annotations

from collections.abc import Sequence


def unspeakable(texts: Sequence[str], pieces: Sequence[bytes | None]) -> str:
    """The first text that no sequence of these pieces spells; "" where there is none. Linear in their characters."""
    known = {piece for piece in pieces if piece}
    if all(bytes([byte]) in known for text in texts for byte in set(text.encode())):
        return ""
    longest = max(map(len, known), default=0)
    return next((text for text in texts if not _spelt(text.encode(), known, longest)), "")


def _spelt(text: bytes, known: set[bytes], longest: int) -> bool:
    reached = [True] + [False] * len(text)  # which beginnings can be spelt
    for end in range(1, len(text) + 1):
        reached[end] = any(reached[at] and text[at:end] in known for at in range(max(0, end - longest), end))
    return reached[-1]
