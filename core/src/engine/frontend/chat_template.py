"""The chat template that a user gives in place of the model's: vLLM's `--chat-template`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import ConfigError, InvalidRequestError, TokenizerError

RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "template"})
"""What a template sees under these names is made from the request."""
_OF_TEMPLATES = "{}\n"
"""What no template is without, and hardly a path with."""


def read_template(given: str | None) -> str | None:
    """The text of a template that is given as a file, or as it is. Raises ConfigError where it is neither."""
    if given is None:
        return None
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if any(character in given for character in _OF_TEMPLATES):
            return given
        found = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"chat_template={given:.200}", f"as a file: {found}", "name a file with a Jinja template, or pass its text"
        ) from error


def check_template(tokenizer: Tokenizer, template: str | None, variables: Mapping[str, Any]) -> None:
    """See before anybody is served that the template renders what a user says. `template` None: it is the model's own,
    which is tried with its first conversation.

    Raises ConfigError, also for variables that a template cannot be given.
    """
    try:
        check_variables(variables)
    except InvalidRequestError as error:
        raise ConfigError(
            f"default_chat_template_kwargs={json.dumps(variables)}", error.found, "leave it out"
        ) from error
    if template is None:
        return
    try:
        tokenizer.render_chat([{"role": "user", "content": "?"}], template=template, **variables)
    except TokenizerError as error:
        raise ConfigError(
            "chat_template", error.found, "mend the template; it has to render one message of a user"
        ) from error


def check_variables(variables: Iterable[str]) -> None:
    """Raise InvalidRequestError for a variable that nobody may set."""
    if taken := sorted(RESERVED.intersection(variables)):
        raise InvalidRequestError(
            f"chat with the template variable {taken[0]!r}",
            f"what the template sees as {taken[0]!r} is made from the request",
            "leave it out of chat_template_kwargs",
        )
