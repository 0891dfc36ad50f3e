"""How long a model may think before it answers."""

from __future__ import annotations

import msgspec

from engine.types.errors import InvalidRequestError, shown

MAX_MARK = 16
"""The most token ids of `begin` and of `end`."""


class ThinkingBudget(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Thoughts that have not ended by themselves are ended.

    Args:
        tokens: where so many tokens of the output are there, and thoughts have begun and not ended, the next are `end`.
        end: token ids that end thoughts, as those of "</think>" do.
        begin: ids with which thoughts begin; []: the prompt has begun them.

    Raises (from `verify`): InvalidRequestError.
    """

    tokens: int
    end: list[int]
    begin: list[int] = []

    def verify(self) -> None:
        """Check types and ranges."""
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or not 0 <= self.tokens < 2**31:
            raise InvalidRequestError(
                f"thinking_budget.tokens={shown(self.tokens)}", "it is no number of tokens from 0"
            )
        for name, least in (("end", 1), ("begin", 0)):
            ids = getattr(self, name)
            whole = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
            if not whole or not least <= len(ids) <= MAX_MARK:
                raise InvalidRequestError(
                    f"thinking_budget.{name}={shown(ids)}", f"it is not a list of {least} to {MAX_MARK} token ids"
                )
