"""What a request's output must look like. The names are vLLM's (`vllm.sampling_params.StructuredOutputsParams`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.types.checks import check_count, check_ids, check_travels, invalid
from engine.types.errors import InvalidRequestError, shown

MAX_CHOICES = 1024
"""The most entries of `choice`."""
MAX_CHOICE_CHARACTERS = 32768
"""The most characters of all entries of `choice` together: each is a state of what is compiled."""
MAX_CHARACTERS = 262144
"""The most characters of any other constraint, a schema's as JSON."""
MAX_START = 64
"""The most ids of `start_after`."""
MAX_DEPTH = 100
"""How deep a schema, or a structural tag, may be nested."""


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
        start_after: token ids; the constraint begins once they have come one after the other, as those of "</think>"
            do, and what comes before is free. Until then the request ends as one without constraint does.
        asked_as: the request's field that it was made from, which errors then name ("response_format"); "": this one.

    Raises (from `verify`): InvalidRequestError.
    """

    choice: list[str] | None = None
    regex: str | None = None
    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    start_after: list[int] | None = None
    asked_as: str = ""

    @property
    def asked(self) -> str:
        """The first part of an error about a verified constraint, which names it: "structured_outputs.regex='a+'"."""
        (kind,) = self.kinds
        return f"structured_outputs.{kind}={shown(getattr(self, kind))}"

    def renamed(self, error: InvalidRequestError) -> InvalidRequestError:
        """An error about this constraint, by the name that it was asked as."""
        name, equals, about = error.asked.partition("=")
        if not self.asked_as or not name.startswith("structured_outputs"):
            return error
        return InvalidRequestError(f"{self.asked_as}={about}" if equals else error.asked, error.found, error.remedy)

    def refused(self, by: Sequence[tuple[str, InvalidRequestError]]) -> InvalidRequestError:
        """The error about a constraint that no driver takes, from what each says: name and error, one or more."""
        _, first = by[0]
        if len({(error.asked, error.found) for _, error in by}) == 1:
            return first
        reasons = [
            f"'{name}': {error.found}" if error.asked == first.asked else f"'{name}': {error.asked}: {error.found}"
            for name, error in by
        ]
        remedy = next((error.remedy for _, error in by if error.remedy), "")
        return InvalidRequestError(first.asked, "no grammar driver takes it: " + "; ".join(reasons), remedy)

    @property
    def schema(self) -> Any:
        """The schema of a verified `json`, decoded; what a structural tag says, decoded. None for other kinds."""
        value = self.json if self.json is not None else self.structural_tag
        return msgspec.json.decode(value) if isinstance(value, str) else value

    @property
    def kinds(self) -> list[str]:
        """The names of those that are set; one, once it is verified."""
        return [name for name in KINDS if getattr(self, name) not in (None, False)]

    def verify(self) -> None:
        """Check that exactly one is set, and its type."""
        kinds = self.kinds
        if len(kinds) != 1:
            asked = f"structured_outputs with {' and '.join(kinds) if kinds else 'no constraint'}"
            raise InvalidRequestError(asked, "exactly one constraint is taken", f"set one of {', '.join(KINDS)}")
        if self.start_after is not None:
            check_ids("structured_outputs.start_after", self.start_after, MAX_START, least=1)
        (kind,) = kinds
        name = f"structured_outputs.{kind}"
        value: Any = getattr(self, kind)
        if self.choice is not None:
            return _check_choice(name, value)
        wanted = {"json": (str, dict), "json_object": (bool,)}.get(kind, (str,))
        if not isinstance(value, wanted):
            names = " or ".join({str: "a text", dict: "a mapping", bool: "true"}[t] for t in wanted)
            raise invalid(name, value, f"it is not {names}")
        if kind == "json" or kind == "structural_tag":
            _check_json(name, value, schema=kind == "json")
        elif isinstance(value, str):
            _check_length(name, value, len(value))
            _check_unicode(name, value)


def _check_json(name: str, value: Any, schema: bool) -> None:
    if isinstance(value, dict):
        check_travels(name, value)
    try:
        text = msgspec.json.encode(value) if isinstance(value, dict) else value
        decoded = value if isinstance(value, dict) or len(text) > MAX_CHARACTERS else msgspec.json.decode(text)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise invalid(name, value, f"it is no JSON: {error}") from error
    _check_length(name, value, len(text))
    if not isinstance(decoded, dict) and not (schema and isinstance(decoded, bool)):
        wanted = "a JSON schema: an object, true or false" if schema else "a JSON object"
        raise invalid(name, value, f"it is not {wanted}")
    if _deeper(decoded, MAX_DEPTH):
        remedy = "name parts of it under $defs and refer to them" if schema else ""
        raise invalid(name, value, f"it is nested more than {MAX_DEPTH} deep", remedy)


def _check_choice(name: str, choice: Any) -> None:
    if not isinstance(choice, list) or not all(isinstance(text, str) for text in choice):
        raise invalid(name, choice, "it is not a list of texts")
    if not choice or not all(choice):
        found = "an empty text is no choice" if choice else "there is nothing to write"
        raise invalid(name, choice, found, "name at least one text, each with a character or more")
    check_count(name, len(choice), MAX_CHOICES, "texts")
    check_count(name, sum(map(len, choice)), MAX_CHOICE_CHARACTERS, "characters together")
    for text in choice:
        _check_unicode(name, text)


def _check_length(name: str, value: object, characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise invalid(name, value, f"it has {characters} characters; at most {MAX_CHARACTERS} are taken")


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, text, f"it is no valid Unicode text: {error}") from error


def _deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [
            child
            for container in level
            if isinstance(container, (dict, list))
            for child in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return False
    return True


_NO_KINDS = ("start_after", "asked_as")
KINDS: tuple[str, ...] = tuple(name for name in StructuredOutputsParams.__struct_fields__ if name not in _NO_KINDS)
"""The constraints by name."""
