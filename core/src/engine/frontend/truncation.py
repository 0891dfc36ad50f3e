"""Prompts that are cut to a length that the request names (vLLM's `truncate_prompt_tokens`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.types.errors import InvalidRequestError, shown

NAME = "truncate_prompt_tokens"
ALL_THAT_FITS = -1


def check(most: Any) -> None:
    """Raise InvalidRequestError for what is neither a number of tokens, nor `ALL_THAT_FITS`, nor None."""
    if most is not None and (type(most) is not int or most < -1 or most == 0):
        raise InvalidRequestError(
            f"{NAME}={shown(most)}", "it is no number of tokens", "pass one from 1, or -1 for what fits"
        )


def last(ids: list[int], most: int | None, fits: int) -> list[int]:
    """The last tokens of a prompt that is to be gone on from.

    Args:
        most: so many; `ALL_THAT_FITS`; None cuts nothing.
        fits: how many leave room for an answer, at least 1.
    """
    if most is None:
        return ids
    return ids[-(fits if most == ALL_THAT_FITS else most) :]


def first(ids: list[int], most: int | None, fits: int, bare: Callable[[], list[int]] | None) -> list[int]:
    """The first tokens of a prompt that is to be pooled; those that the tokenizer puts around a text stay around it.

    Args:
        most: so many in all; `ALL_THAT_FITS`; None cuts nothing.
        fits: how many the model takes.
        bare: gives the ids without those around them; None where there are none.

    Raises InvalidRequestError where no token of the text would be left.
    """
    if most is None:
        return ids
    most = fits if most == ALL_THAT_FITS else most
    if len(ids) <= most:
        return ids
    inner = ids if bare is None else bare()
    before = next((i for i in range(len(ids) - len(inner) + 1) if ids[i : i + len(inner)] == inner), None)
    if before is None:
        raise InvalidRequestError(
            f"{NAME}={most}", "the tokenizer does not put its own tokens around a text", "leave it out"
        )
    after = len(ids) - before - len(inner)
    if most <= before + after:
        raise InvalidRequestError(
            f"{NAME}={most}", f"the tokenizer puts {before + after} tokens around a text, and none of it would be left",
            "raise it",
        )  # fmt: skip
    return [*ids[:before], *inner[: most - before - after], *ids[len(ids) - after :]]


def pair(
    ids: list[int], first: list[int], second: list[int], second_start: int | None, most: int
) -> tuple[list[int], int | None]:
    """Two texts that are read as one prompt, cut to `most` tokens in all: from the end of the longer one, then of both,
    as Hugging Face's tokenizers do ("longest_first"). What the tokenizer puts around and between them stays.

    Args:
        ids: the whole prompt.
        first, second: the texts alone.
        second_start: where the tokens of the second type begin.

    Raises InvalidRequestError where no token of the texts would be left.
    """
    if len(ids) <= most:
        return ids, second_start
    before = _place(ids, first, 0)
    between = None if before is None else _place(ids, second, before + len(first))
    if before is None or between is None:
        raise InvalidRequestError(
            f"{NAME}={most}", "the tokenizer does not put its own tokens around the texts of a pair", "leave it out"
        )
    around = len(ids) - len(first) - len(second)
    if most <= around:
        raise InvalidRequestError(
            f"{NAME}={most}",
            f"the tokenizer puts {around} tokens around a pair, and none of it would be left",
            "raise it",
        )
    short, long = sorted((len(first), len(second)))
    if 2 * short <= most - around:
        long = most - around - short
    else:
        short = (most - around) // 2
        long = most - around - short
    kept, kept_second = (long, short) if len(first) > len(second) else (short, long)
    cut = [*ids[:before], *first[:kept], *ids[before + len(first) : between]]
    cut += [*second[:kept_second], *ids[between + len(second) :]]
    return cut, None if second_start is None else second_start - (len(first) - kept)


def _place(ids: list[int], text: list[int], start: int) -> int | None:
    return next((i for i in range(start, len(ids) - len(text) + 1) if ids[i : i + len(text)] == text), None)
