"""Prompts that are pooled and cut (entry-point group `engine_parts`)."""

from __future__ import annotations

from collections.abc import Callable

from engine.types.errors import InvalidRequestError


def cut_to_first(ids: list[int], most: int, bare: Callable[[], list[int]] | None) -> list[int]:
    """The first tokens of a prompt that is to be pooled; those that the tokenizer puts around a text stay around it.

    Args:
        most: so many in all.
        bare: gives the ids without those around them; None where there are none.

    Raises InvalidRequestError where no token of the text would be left.
    """
    if len(ids) <= most:
        return ids
    inner = ids if bare is None else bare()
    before = next((i for i in range(len(ids) - len(inner) + 1) if ids[i : i + len(inner)] == inner), None)
    if before is None:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={most}", "the tokenizer does not put its own tokens around a text", "leave it out"
        )
    after = len(ids) - before - len(inner)
    if most <= before + after:
        found = f"the tokenizer puts {before + after} tokens around a text, and none of it would be left"
        raise InvalidRequestError(f"truncate_prompt_tokens={most}", found, "raise it")
    return [*ids[:before], *inner[: most - before - after], *ids[len(ids) - after :]]
