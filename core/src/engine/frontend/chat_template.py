"""The chat template at work: the model's, or the one that a user gives in its place (vLLM's `--chat-template`)."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.frontend.prompts import TextPrompt
from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import ConfigError, InvalidRequestError, TokenizerError, shown

RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "template"})
"""What a template sees under these names is made from the request."""
_OF_TEMPLATES = "{}\n"
"""What no template is without, and hardly a path with."""
_PROBE = ({"role": "user", "content": "?"},)


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


class ChatTemplate:
    """Makes prompts of conversations. Safe to call from several threads.

    Args:
        tokenizer: at work.
        template: in place of the model's; None: it is the model's own.
        variables: of the template, where a request does not set them.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._variables = dict(variables or {})
        self._told_apart: dict[bytes, bool] = {}

    def check(self) -> None:
        """See before anybody is served that the template renders what a user says. The model's own is tried with its
        first conversation.

        Raises ConfigError, also for variables that a template cannot be given.
        """
        try:
            check_variables(self._variables)
        except InvalidRequestError as error:
            raise ConfigError(
                f"default_chat_template_kwargs={json.dumps(self._variables)}", error.found, "leave it out"
            ) from error
        if self._template is None:
            return
        try:
            self.render(_PROBE)
        except TokenizerError as error:
            raise ConfigError(
                "chat_template", error.found, "mend the template; it has to render one message of a user"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> TextPrompt:
        """A conversation as a prompt. The template writes all special tokens itself, so none are added to it.

        Raises:
            InvalidRequestError: these are no messages, or they hold more than text.
            TokenizerError: there is no template, or it refuses the messages.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise InvalidRequestError(
                f"chat with messages={shown(messages)}",
                "that is no list of messages",
                'pass [{"role": "user", "content": "..."}]',
            )
        check_variables(variables or ())
        try:
            text = self._tokenizer.render_chat(
                [_text_message(message) for message in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                template=self._template if template is None else template,
                **{**self._variables, **(variables or {})},
            )
        except RecursionError as error:
            raise InvalidRequestError(
                f"chat with {len(messages)} messages", "the data in them is nested too deeply", "send flatter data"
            ) from error
        return TextPrompt(prompt=text, add_special_tokens=False)

    def tells_apart(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether the prompt depends on these variables: a fact of the template, tried once with a short conversation.
        False where it renders none.

        Args:
            one, other: values that a template which knows the variables writes differently. Not a user's: what was
                found is kept.
        """
        key = msgspec.json.encode((one, other))
        if key not in self._told_apart:
            try:
                first, second = (self.render(_PROBE, variables=variables) for variables in (one, other))
                self._told_apart[key] = first != second
            except TokenizerError:
                self._told_apart[key] = False
        return self._told_apart[key]


def check_variables(variables: Iterable[str]) -> None:
    """Raise InvalidRequestError for a variable that nobody may set."""
    if taken := sorted(RESERVED.intersection(variables)):
        raise InvalidRequestError(
            f"chat with the template variable {taken[0]!r}",
            f"what the template sees as {taken[0]!r} is made from the request",
            "leave it out of chat_template_kwargs",
        )


def _text_message(message: Any) -> dict[str, Any]:
    """A message whose content, if it is a list of text parts, has become one text: what every template can read."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f"chat with the message {reprlib.repr(message)}",
            "it has no role",
            'pass {"role": "user", "content": "..."}',
        )
    if message.get("tool_calls") is not None:
        message = {**message, "tool_calls": read_calls(message["tool_calls"])}
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(
                f"chat with a content part of type {kind!r}", "this engine reads text only", "send text parts"
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """OpenAI's `tool_calls` of an earlier turn, the arguments of each as an object: clients send text, templates write
    JSON of an object. Text that is none stays text, as the model wrote it.

    Raises InvalidRequestError for what are no calls.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise _bad(calls, "that is no list")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(call, "it has no function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _object(arguments)
    elif not isinstance(arguments, Mapping):
        raise _bad(call, "its arguments are neither text nor an object")
    return {**call, "function": {**function, "arguments": arguments}}


def _object(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return text
    return value if isinstance(value, dict) else text


def _bad(found: Any, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"chat with the tool call {reprlib.repr(found)}",
        why,
        'pass {"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}',
    )
