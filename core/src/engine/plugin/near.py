"""Near matches: what a mistyped name most likely meant."""

from __future__ import annotations

from collections.abc import Iterable


def near_matches(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names that resemble `name`, best first; case, dashes and underscores do not count."""
    from difflib import get_close_matches

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    by_plain: dict[str, str] = {}
    for candidate in known:
        by_plain.setdefault(plain(candidate), candidate)
    return [by_plain[match] for match in get_close_matches(plain(name), list(by_plain), n=limit, cutoff=0.6)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "did you mean 'a' or 'b'?", or an empty string where nothing resembles `name`."""
    matches = near_matches(name, known)
    return f"did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""
