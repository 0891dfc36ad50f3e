"""The cards of the tool parsers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.interfaces.tool_parser import ToolParserCard, ToolParserNeed

_HOME = "engine_parsers.tool_parsers"
Calls = Sequence[tuple[str, Mapping[str, Any]]]


class Hermes(ToolParserCard):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3, and the bundled model."""

    body = f"{_HOME}.hermes:HermesParser"

    @classmethod
    def recognises(cls, need: ToolParserNeed) -> bool:
        """The template has the tag, and `arguments`; not the tags that others put inside it."""
        template = need.chat_template
        others = any(tag in template for tag in ("<function=", "<arg_key>", "<tool_sep>"))
        return "<tool_call>" in template and "arguments" in template and not others

    @classmethod
    def write(cls, calls: Calls) -> str:
        return "\n".join(f"<tool_call>\n{_object(name, 'arguments', given)}\n</tool_call>" for name, given in calls)


class Llama3Json(ToolParserCard):
    """`{"name": ..., "parameters": {...}}`, several divided by `;`: Llama 3.1 to 3.3."""

    body = f"{_HOME}.llama3_json:Llama3JsonParser"

    @classmethod
    def recognises(cls, need: ToolParserNeed) -> bool:
        """The template asks for this form in Meta's words."""
        return '{"name": function name, "parameters": ' in need.chat_template

    @classmethod
    def write(cls, calls: Calls) -> str:
        return "; ".join(_object(name, "parameters", given) for name, given in calls)


class Mistral(ToolParserCard):
    """`[TOOL_CALLS]` and a list of objects, or `[TOOL_CALLS]name[ARGS]{...}`: Mistral's models, old and new."""

    body = f"{_HOME}.mistral:MistralParser"
    reads_special_tokens = True

    @classmethod
    def recognises(cls, need: ToolParserNeed) -> bool:
        """The template has the marker."""
        return "[TOOL_CALLS]" in need.chat_template

    @classmethod
    def write(cls, calls: Calls) -> str:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)


class Qwen(ToolParserCard):
    """`<function=name><parameter=key>value</parameter></function>` between `<tool_call>` tags: Qwen3-Coder; and what
    `hermes` reads."""

    body = f"{_HOME}.qwen:QwenParser"

    @classmethod
    def recognises(cls, need: ToolParserNeed) -> bool:
        """The template has both inner tags."""
        return "<function=" in need.chat_template and "<parameter=" in need.chat_template

    @classmethod
    def write(cls, calls: Calls) -> str:
        return "\n".join(map(_qwen_call, calls))


class Pythonic(ToolParserCard):
    """`[name(key=value), ...]`: Llama 3.2 and 4 and others that answer with Python."""

    body = f"{_HOME}.pythonic:PythonicParser"

    @classmethod
    def recognises(cls, need: ToolParserNeed) -> bool:
        """The template asks for this form in Meta's words."""
        return "[func_name1(params_name1=" in need.chat_template

    @classmethod
    def write(cls, calls: Calls) -> str:
        written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
        if not all(key.isidentifier() for _, given in calls for key in given):
            raise ValueError("a keyword of Python is an identifier")
        return f"[{', '.join(written)}]" if calls else ""


class DeepSeek(ToolParserCard):
    """DeepSeek's tokens around a name and its arguments: V3, R1 and V3.1."""

    body = f"{_HOME}.deepseek:DeepSeekParser"
    reads_special_tokens = True

    @classmethod
    def recognises(cls, need: ToolParserNeed) -> bool:
        """The template has the token that begins the calls."""
        return "<｜tool▁calls▁begin｜>" in need.chat_template

    @classmethod
    def write(cls, calls: Calls) -> str:
        inner = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in calls]
        return f"<｜tool▁calls▁begin｜>{''.join(inner)}<｜tool▁calls▁end｜>" if calls else ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(name: str, key: str, arguments: Mapping[str, Any]) -> str:
    return f'{{"name": {_json(name)}, "{key}": {_json(arguments)}}}'


def _qwen_call(call: tuple[str, Mapping[str, Any]]) -> str:
    name, arguments = call
    lines = ["<tool_call>", f"<function={name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else _json(value)
        if ">" in key or key != key.strip() or "</parameter>" in text:
            raise ValueError("the text of a parameter cannot hold its own tags")
        lines += [f"<parameter={key}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])
