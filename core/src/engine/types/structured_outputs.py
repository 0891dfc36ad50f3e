"""What a request's output must look like. The names are vLLM's (`vllm.sampling_params.StructuredOutputsParams`)."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types.errors import InvalidRequestError

MAX_CHOICES = 1024
"""The most entries of `choice`."""
MAX_CHOICE_CHARACTERS = 32768
"""The most characters of all entries of `choice` together: each is a state of what is compiled."""


class StructuredOutputsParams(msgspec.Struct, kw_only=True, dict=False, omit_defaults=True):
    """One constraint on the output, enforced by the grammar driver at work. Exactly one is set.

    Which of them are served is the driver's to say (`GrammarCard.constraints`); the others are refused by name.

    Args:
        choice: the output is one of these texts, and then ends.
        regex: it matches this regular expression as a whole.
        json: it is JSON of this schema, given as a mapping or as text.
        json_object: it is some JSON object.
        grammar: it is a sentence of this context-free grammar.
        structural_tag: parts of it, between given tags, are of given forms.

    Raises (from `verify`): InvalidRequestError.
    """

    choice: list[str] | None = None
    regex: str | None = None
    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    grammar: str | None = None
    structural_tag: str | None = None

    @property
    def kinds(self) -> list[str]:
        """The names of those that are set; one, once it is verified."""
        return [name for name in KINDS if getattr(self, name) not in (None, False)]

    def verify(self) -> None:
        """Check that exactly one is set, and its type."""
        kinds = self.kinds
        if len(kinds) != 1:
            raise InvalidRequestError(
                f"structured_outputs with {' and '.join(kinds) if kinds else 'no constraint'}",
                "exactly one constraint is taken",
                f"set one of {', '.join(KINDS)}",
            )
        (kind,) = kinds
        value = getattr(self, kind)
        if self.choice is not None:
            return self._verify_choice()
        wanted = {"json": (str, dict), "json_object": (bool,)}.get(kind, (str,))
        if not isinstance(value, wanted):
            names = " or ".join({str: "a text", dict: "a mapping", bool: "true"}[t] for t in wanted)
            raise InvalidRequestError(f"structured_outputs.{kind}={value!r:.80}", f"it is not {names}")
        if kind == "json" and isinstance(value, dict):
            try:
                msgspec.msgpack.encode(value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise InvalidRequestError(
                    f"structured_outputs.json={value!r:.80}", f"it holds what does not travel: {error}"
                ) from error

    def _verify_choice(self) -> None:
        choice = self.choice
        if not isinstance(choice, list) or not all(isinstance(text, str) for text in choice):
            raise InvalidRequestError(f"structured_outputs.choice={choice!r:.80}", "it is not a list of texts")
        if not choice or not all(choice):
            raise InvalidRequestError(
                f"structured_outputs.choice={choice!r:.80}",
                "there is nothing to write" if not choice else "an empty text is no choice",
                "name at least one text, each with a character or more",
            )
        characters = sum(map(len, choice))
        if len(choice) > MAX_CHOICES or characters > MAX_CHOICE_CHARACTERS:
            raise InvalidRequestError(
                f"structured_outputs.choice=[{len(choice)} texts of {characters} characters]",
                f"at most {MAX_CHOICES} texts of {MAX_CHOICE_CHARACTERS} characters together are taken",
                "send fewer or shorter ones",
            )
        for text in choice:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequestError(
                    f"structured_outputs.choice=[{text!r:.80}]", f"it is no valid Unicode text: {error}"
                ) from error


KINDS: tuple[str, ...] = StructuredOutputsParams.__struct_fields__
"""The constraints by name."""
