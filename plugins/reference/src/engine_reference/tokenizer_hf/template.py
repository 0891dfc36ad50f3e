"""Chat templates: where they are kept, and how they are rendered.

The environment is the one that model authors write for, transformers': a sandbox in which templates can change
nothing, with `trim_blocks`, `lstrip_blocks`, loop controls, a `generation` tag that marks what the assistant said
(here only its content counts), and `tojson`, `raise_exception`, `strftime_now`.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.types.errors import TokenizerError

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which clients pass a message's reasoning; templates read the first, gpt-oss' the second."""


SECONDS = 10.0
"""For one conversation. The longest that models take are rendered in a part of that."""
LARGEST = 10_000_000
"""Elements of a repeated text or list, bits of a power."""

_WATCHED = "engine: watched"


class TemplateTimeoutError(jinja2.TemplateError):
    """A template was not done in time."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment in which rendering ends.

    Args:
        seconds: for one rendering.
        **options: jinja's.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, *, seconds: float = SECONDS, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._local = threading.local()  # templates are rendered on several threads at once
        self.filters[_WATCHED] = lambda iterable: _Watched(iterable, self.look)

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render a template of this environment. Raises TemplateTimeoutError, and whatever templates raise."""
        self._local.deadline = time.monotonic() + self._seconds
        return template.render(variables)

    def look(self) -> None:
        """Raise TemplateTimeoutError where the time is over."""
        if time.monotonic() > getattr(self._local, "deadline", float("inf")):
            raise TemplateTimeoutError(f"it was not done after {self._seconds:g} s")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Of a function, method or macro; see jinja2."""
        self.look()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See jinja2."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right)
        else:
            long, times = (left, right) if hasattr(left, "__len__") else (right, left)
            size = len(long) * times if hasattr(long, "__len__") and isinstance(times, int) else 0
        if size > LARGEST:
            raise SecurityError(f"the template makes a value of {size} elements")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _WATCHED, [], [], None, None, lineno=loop.lineno)
        return tree


class _Watched:
    """What a loop goes through."""

    def __init__(self, iterable: Iterable[Any], look: Any) -> None:
        self._iterable = iterable
        self._look = look

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._look()
            yield item

    def __len__(self) -> int:  # for `loop.length`; without one jinja makes a list
        return len(self._iterable)  # type: ignore[arg-type]


class ChatTemplates:
    """The templates of one tokenizer, by name; the one without a name is "default".

    Args:
        templates: name to source.
        variables: what every template sees, e.g. `bos_token`.
        where: the folder, for messages.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str], where: str) -> None:
        self._templates = dict(templates)
        self._variables = dict(variables)
        self._where = where
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        template: str | None,
        variables: Mapping[str, Any],
    ) -> str:
        """See `engine.interfaces.tokenizer.Tokenizer.render_chat`; `template` is a name or a source."""
        asked = f"render {len(messages)} chat messages"
        source = self._choose(template, bool(tools), asked)
        try:
            compiled = self._compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                asked, f"the chat template is broken at line {error.lineno}: {error.message}", "mend the template"
            ) from error
        seen: dict[str, Any] = {"documents": None, **self._variables, **_plain(variables)}
        seen["messages"] = [_message(message) for message in messages]
        seen["tools"] = None if tools is None else _plain(list(tools))
        seen["add_generation_prompt"] = add_generation_prompt
        try:
            return self._environment.render(compiled, seen)
        except TemplateTimeoutError as error:
            raise TokenizerError(
                asked, f"the chat template is too slow: {error.message}", "send fewer or shorter messages"
            ) from error
        except jinja2.TemplateError as error:
            raise TokenizerError(
                asked, f"the chat template refuses them: {error.message or error}", "change the messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # What a template does with data of a kind that it did not expect is plain Python.
            raise TokenizerError(
                asked,
                f"the chat template failed on them: {type(error).__name__}: {error}",
                "check the messages against what the model's template expects",
            ) from error

    def _choose(self, template: str | None, with_tools: bool, asked: str) -> str:
        if template is not None:
            return self._templates.get(template, template)
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise TokenizerError(
                asked, f"the model has chat templates named {names}, and no default", "pass chat_template=<name>"
            )
        raise TokenizerError(
            asked,
            f"'{self._where}' has no chat template (no chat_template.jinja, none in tokenizer_config.json)",
            "pass chat_template=..., use a chat model, or send a plain prompt instead of messages",
        )

    def _compile(self, source: str) -> jinja2.Template:
        with self._lock:
            compiled = self._compiled.get(source)
            if compiled is None:
                compiled = self._environment.from_string(source)
                if len(self._compiled) >= 64:  # requests may bring their own templates
                    del self._compiled[next(iter(self._compiled))]
                self._compiled[source] = compiled
            return compiled


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: plain data, no keys that say None, reasoning under both of its names."""
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy of plain JSON types. Templates come from strangers: no object with methods of its own reaches one."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump())
    return f"<{type(value).__name__}>"


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: its content as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as in transformers, where the block is a macro's body.
        return nodes.Scope(body, lineno=line)


class _Dict:
    """`dict(...)` for templates: makes dicts, and gives no way to the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps: jinja's own `tojson` escapes HTML, which prompts are not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    return environment
