"""The bodies of Anthropic's routes, and from their messages and tools to a `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.types.params import SamplingDefaults, SamplingParams
from engine.types.structured_outputs import StructuredOutputsParams
from engine.types.tools import FunctionTool
from engine_server.bodies import Body, GeneratingBody, Objects, Strings, encoded, sampling_params
from engine_server.conversation.tools import (
    Choice,
    ToolRequest,
    chat_form,
    check_chosen,
    check_names,
    function_tool,
    read_tools,
)
from engine_server.conversation.turn import Conversation
from engine_server.fields import JSONObject, bad


class CacheControl(Body):
    """What begins like an earlier prompt is found in the prefix cache, marked or not, so that a mark asks nothing more.
    `ttl` is refused: pages stay as long as there is room.

    Args:
        type: the only one.
    """

    type: Literal["ephemeral"]


class Thinking(Body):
    """Whether the model thinks before it answers.

    Args:
        type: "adaptive" leaves it to the model; "disabled" keeps it from thinking, and is refused where its chat
            template has no switch for that; "enabled" lets it think for `budget_tokens`, and is refused where nobody
            knows how the model marks its thoughts.
        budget_tokens: with "enabled": thoughts that have not ended after so many tokens are ended.
    """

    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Thinking:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise ValueError("budget_tokens and the type enabled go together")
        return self


class Metadata(Body):
    """About the request.

    Args:
        user_id: the client's name for its own user, which stands in the access log.
    """

    user_id: str | None = None


class OutputFormat(Body):
    """What the answer must be.

    Args:
        type: JSON of a schema.
        schema: which; enforced by the grammar at work.
    """

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """About the answer.

    Args:
        format: what it must be; without one, any text. Where calls of tools may come, it is this or calls.
        effort: how much the model thinks, where its chat template takes that.
    """

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ToolChoice(Body):
    """What the model does with tools.

    Args:
        type: "auto" leaves it to the model, "any" makes it call at least one, "tool" the one that `name` says, "none"
            hides them.
        name: with "tool".
        disable_parallel_tool_use: one call at most.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("name and the type tool go together")
        if self.disable_parallel_tool_use is not None and self.type == "none":
            raise ValueError("disable_parallel_tool_use says nothing where no tool is called; leave it out")
        return self


class CountTokensBody(Body):
    """`POST /v1/messages/count_tokens`.

    Args:
        messages: of user and assistant in turn; content is text, or blocks `text`, `thinking`, `tool_use` and
            `tool_result`. A last message of the assistant is the beginning of the answer.
        system: a text, or blocks of text.
        tools: that the model may call, each with `name`, `description`, `input_schema` and `strict`.
        tool_choice: what the model does with them.
        thinking: whether it thinks before it answers; without it, the model decides.
        output_config: what the answer must be.
        cache_control: asks for what is so in any case.
        chat_template_kwargs: ours: further variables for the model's chat template.
    """

    model: str | None = None
    messages: Objects
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, GeneratingBody):
    """`POST /v1/messages`.

    Args:
        max_tokens: the most tokens of the answer, thoughts included.
        stop_sequences: texts that end the answer, and are left out of it.
        metadata: about the request.
        service_tier: all requests are served alike, as the answer's `usage` says: "standard".
        cache_salt, seed, min_p, repetition_penalty, priority, timeout: ours, as with chat completions.
    """

    max_tokens: int
    stop_sequences: Strings | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @model_validator(mode="after")
    def _budget_leaves_an_answer(self) -> MessagesBody:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ValueError("thinking.budget_tokens has to be less than max_tokens")
        return self

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """The request's parameters over the model's; the engine verifies them."""
        more: dict[str, Any] = {} if self.stop_sequences is None else {"stop": self.stop_sequences}
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.schema_
            more["structured_outputs"] = StructuredOutputsParams(json=schema, asked_as="output_config")
        return sampling_params(self, defaults, self.max_tokens, **more)


_CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_HERE = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}
"""The blocks that may stand in a message of each role."""


def conversation(body: CountTokensBody) -> Conversation:
    """What a body says. Raises APIError, a 400 that says where."""
    if not body.messages:
        raise bad("messages", "is empty", "send at least one")
    read = _Messages()
    if body.system is not None and (system := _texts(body.system, "system")):
        read.add("system", system)
    for i, message in enumerate(body.messages):
        read.take(message, f"messages.{i}")
    prefill = read.cut_prefill(f"messages.{len(body.messages) - 1}")
    return Conversation(
        messages=read.messages,
        tools=tool_request(body),
        variables=body.chat_template_kwargs,
        prefill=prefill,
    )


def tool_request(body: CountTokensBody) -> ToolRequest:
    """What a body says of tools."""
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise bad("tool_choice", f'is of type "{choice.type}", and there are no tools', "send tools")
        return ToolRequest()
    tools = read_tools(body.tools, _tool)
    check_names(tools)
    choice = choice or ToolChoice(type="auto")
    name = "" if choice.name is None else check_chosen(choice.name, tools)
    given = tuple(chat_form(tool) for tool in tools)
    return ToolRequest(tools, given, _CHOICES[choice.type], name, not choice.disable_parallel_tool_use)


def _tool(i: int, tool: Mapping[str, Any]) -> FunctionTool:
    where = f"tools.{i}"
    fields = {name: value for name, value in tool.items() if value is not None}
    kind = fields.pop("type", "custom")
    if kind != "custom":
        raise bad(f"{where}.type", f"is {short(kind)}", 'send "custom": this server has no tools of its own')
    _cache_control(fields.pop("cache_control", None), where)
    if "input_schema" not in fields:
        raise bad(f"{where}.input_schema", "is missing", "send a JSON schema of an object")
    return function_tool(fields, where, "input_schema")


class _Messages:
    """Reads messages one after another. Those of one role in a row become one, as Anthropic's server has it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        """Of the functions called, by the id of the call."""

    def add(self, role: str, text: str) -> None:
        """A text of this role."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == role:
            last["content"] = f"{last['content']}\n{text}" if last["content"] else text
        else:
            self.messages.append({"role": role, "content": text})

    def take(self, message: Mapping[str, Any], where: str) -> None:
        """One of Anthropic's messages."""
        fields = JSONObject(message, where)
        role = fields.one_of("role", ("user", "assistant"))
        content = fields.take("content")
        fields.end()
        if isinstance(content, str):
            return self.add(role, content)
        if not isinstance(content, list) or not content:
            raise bad(f"{where}.content", f"is {short(content)}", "send a text, or a list of blocks")
        for i, value in enumerate(content):
            self._block(role, JSONObject(value, f"{where}.content.{i}"))

    def cut_prefill(self, where: str) -> str:
        """Take away what the assistant says last: the answer begins with it. "" where the user has spoken last."""
        last = self.messages[-1]
        if last["role"] != "assistant":
            return ""
        if strange := [name for name in ("tool_calls", "reasoning_content") if name in last]:
            kind = "tool_use" if strange[0] == "tool_calls" else "thinking"
            raise bad(where, f"ends the messages with a block of type {kind}", "let a message of the user follow")
        self.messages.pop()
        if not self.messages:
            raise bad("messages", "holds no message of the user", "begin with one")
        return str(last["content"])

    def _block(self, role: str, block: JSONObject) -> None:
        kind = block.one_of("type", _HERE[role])
        match kind:
            case "text":
                self.add(role, block.text("text"))
                if block.take("citations"):
                    raise bad(f"{block.where}.citations", "is not supported", "leave it out")
            case "thinking":
                block.take("signature")  # nothing depends on who has written the thoughts
                self._assistant("reasoning_content", block.text("thinking"))
            case "tool_use":
                self._call(block)
            case "tool_result":
                self._result(block)
        _cache_control(block.take("cache_control"), block.where)
        block.end()

    def _assistant(self, field: str, value: Any) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        last = self.messages[-1]
        if field == "tool_calls":
            last.setdefault(field, []).append(value)
        else:
            last[field] = f"{last[field]}\n{value}" if field in last else value

    def _call(self, block: JSONObject) -> None:
        identity, name, given = block.text("id"), block.text("name"), block.take("input")
        if not isinstance(given, Mapping):
            raise bad(f"{block.where}.input", f"is {short(given)}", "send an object")
        self._names[identity] = name
        function = {"name": name, "arguments": encoded(given).decode()}
        self._assistant("tool_calls", {"id": identity, "type": "function", "function": function})

    def _result(self, block: JSONObject) -> None:
        identity, content = block.text("tool_use_id"), block.take("content")
        if identity not in self._names:
            raise bad(
                f"{block.where}.tool_use_id",
                f"is {short(identity)}, which no earlier tool_use has",
                "send its id",
            )
        text = _texts(content, f"{block.where}.content") if content is not None else ""
        if block.flag("is_error"):
            text = f"Error: {text}"
        message = {"role": "tool", "tool_call_id": identity, "name": self._names[identity], "content": text}
        self.messages.append(message)


def _texts(content: Any, where: str) -> str:
    """A text, or the texts of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(where, f"is {short(content)}", "send a text, or a list of text blocks")
    texts: list[str] = []
    for i, value in enumerate(content):
        block = JSONObject(value, f"{where}.{i}")
        block.one_of("type", ("text",))
        texts.append(block.text("text"))
        _cache_control(block.take("cache_control"), block.where)
        if block.take("citations"):
            raise bad(f"{block.where}.citations", "is not supported", "leave it out")
        block.end()
    return "\n".join(texts)


def _cache_control(value: Any, where: str) -> None:
    """See `bodies.CacheControl`."""
    if value is not None:
        mark = JSONObject(value, f"{where}.cache_control")
        mark.one_of("type", ("ephemeral",))
        mark.end()
