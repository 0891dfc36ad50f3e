"""Prompts that are cut to a length that the request names (vLLM's `truncate_prompt_tokens`)."""

from __future__ import annotations

from collections.abc import Callable

from engine.types.errors import InvalidRequestError

NAME = "truncate_prompt_tokens"
ALL_THAT_FITS = -1


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
