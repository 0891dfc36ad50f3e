"""What requests are sampled with where they do not say it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.types.params import SamplingParams


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that a model's makers, or who runs the engine, have chosen in place of the neutral ones.

    Args:
        params: by their names in `SamplingParams`; those that are not here are neutral.
        max_tokens_limit: no request of the server gets more tokens, whatever it asks for; None: no such limit.
        source: who chose them, for people.
    """

    params: dict[str, int | float] = msgspec.field(default_factory=dict)
    max_tokens_limit: int | None = None
    source: str = ""

    def sampling_params(self) -> SamplingParams:
        """The parameters of a request that says nothing; new ones at each call."""
        return SamplingParams(**self.params)  # type: ignore[arg-type]

    def under(self, given: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
        """The keywords of `SamplingParams` for a request to the server.

        Args:
            given: what the request says, without `max_tokens`.
            max_tokens: what it says of that, or the route's own default; None: this one's, and without one what fits.
        """
        if max_tokens is None:
            max_tokens = self.params.get("max_tokens")  # type: ignore[assignment]
        # What is no integer is left to be refused by its name.
        if self.max_tokens_limit is not None and (max_tokens is None or type(max_tokens) is int):
            max_tokens = self.max_tokens_limit if max_tokens is None else min(max_tokens, self.max_tokens_limit)
        return {**self.params, **given, "max_tokens": max_tokens}

    def __str__(self) -> str:
        """Such as "temperature 0.6, top_k 20, by the model's generation_config.json"; "" where all is neutral."""
        if not self.params:
            return ""
        told = ", ".join(f"{name} {value}" for name, value in self.params.items())
        limit = "" if self.max_tokens_limit is None else f"; no request gets more than {self.max_tokens_limit} tokens"
        return f"{told}, by {self.source}{limit}"
