"""The bodies of Anthropic's routes, and from their messages and tools to a `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from reprlib import repr as short
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.interfaces.tool_parser import FunctionTool
from engine.types.params import SamplingDefaults, SamplingParams
from engine.types.structured_outputs import StructuredOutputsParams
from engine_server.anthropic.cache_marks import CacheControl, Mark, check_number, take_mark
from engine_server.bodies import Body, GeneratingBody, Objects, Strings, encoded
from engine_server.conversation.reading import JSONObject, Messages, bad, texts
from engine_server.conversation.tools import Choice, ToolRequest, chat_form, check_chosen, function_tool, read_tools
from engine_server.conversation.turn import Conversation
from engine_server.state import sampling_params


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
        cache_control: keeps the whole prompt, as if it stood at its last block.
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
        max_tokens: the most tokens of the answer, thoughts included; 0: only the prompt is brought to the device.
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
        if budget is not None and self.max_tokens and budget >= self.max_tokens:
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


def conversation(body: CountTokensBody) -> tuple[Conversation, list[Mark]]:
    """What a body says, and its marks of `cache_control`. Raises APIError, a 400 that says where."""
    if not body.messages:
        raise bad("messages", "is empty", "send at least one")
    read = _MessagesReader()
    if body.system is not None:
        read.take_system(body.system)
    system = read.beginning()
    for i, message in enumerate(body.messages):
        read.take(message, f"messages.{i}")
    prefill = read.cut_prefill(f"messages.{len(body.messages) - 1}")
    tools, seconds = tool_request(body)
    marks = [Mark(one, system, i + 1) for i, one in enumerate(seconds) if one is not None]
    marks += read.marks
    if body.cache_control is not None:
        marks.append(Mark(body.cache_control.seconds, None))
    check_number(marks)
    said = Conversation(
        messages=read.row, tools=tools, variables=body.chat_template_kwargs, prefill=prefill, model=body.model
    )
    return said, marks


def tool_request(body: CountTokensBody) -> tuple[ToolRequest, list[float | None]]:
    """What a body says of tools, and the mark of each."""
    choice = body.tool_choice or ToolChoice(type="auto")
    if not body.tools:
        if choice.type in ("any", "tool"):
            raise bad("tool_choice", f'is of type "{choice.type}", and there are no tools', "send tools")
        return ToolRequest(), []
    marks: list[float | None] = []
    offered = read_tools(body.tools, partial(_tool, marks))
    name = "" if choice.name is None else check_chosen(choice.name, offered)
    parallel = not choice.disable_parallel_tool_use
    return ToolRequest(offered, chat_form(offered), _CHOICES[choice.type], name, parallel), marks


def _tool(marks: list[float | None], i: int, tool: Mapping[str, Any]) -> FunctionTool:
    fields = JSONObject(tool, f"tools.{i}")
    if (kind := fields.take("type") or "custom") != "custom":
        raise bad(f"{fields.where}.type", f"is {short(kind)}", 'send "custom": this server has no tools of its own')
    marks.append(take_mark(fields))
    if fields.left.get("input_schema") is None:
        raise bad(f"{fields.where}.input_schema", "is missing", "send a JSON schema of an object")
    return function_tool(fields.left, fields.where, "input_schema")


class _MessagesReader(Messages):
    """Reads messages one after another. Those of one role in a row become one, as Anthropic's server has it.

    Attributes:
        marks: those at blocks of messages and of the system prompt.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Mark] = []

    def beginning(self) -> list[dict[str, Any]]:
        """All messages so far, as they stand by now."""
        return [
            {**said, "tool_calls": list(said["tool_calls"])} if "tool_calls" in said else dict(said)
            for said in self.row
        ]

    def take_system(self, system: str | list[dict[str, Any]]) -> None:
        """The system prompt. One that is empty is none."""
        marks: list[float | None] = []
        if text := _texts(system, "system", marks):
            self.add("system", text)
        for i, seconds in enumerate(marks):
            if seconds is not None:
                begun = "\n".join(block["text"] for block in system[: i + 1])  # type: ignore[index]
                self._mark(seconds, [{"role": "system", "content": begun}])

    def add(self, role: str, text: str) -> None:
        """A text of this role."""
        last = self.row[-1] if self.row else None
        if last is not None and last["role"] == role:
            _grow(last, "content", text)
        else:
            self.row.append({"role": role, "content": text})

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
        last = self.row[-1]
        if last["role"] != "assistant":
            return ""
        if strange := [name for name in ("tool_calls", "reasoning_content") if name in last]:
            kind = "tool_use" if strange[0] == "tool_calls" else "thinking"
            raise bad(where, f"ends the messages with a block of type {kind}", "let a message of the user follow")
        self.row.pop()
        if not self.row:
            raise bad("messages", "holds no message of the user", "begin with one")
        return str(last["content"])

    def _block(self, role: str, block: JSONObject) -> None:
        marks: list[float | None] = []
        match block.one_of("type", _HERE[role]):
            case "text":
                self.add(role, block.text("text"))
                _no_citations(block)
            case "thinking":
                block.take("signature")  # nothing depends on who has written the thoughts
                _grow(self.assistants(), "reasoning_content", block.text("thinking"))
            case "tool_use":
                identity, name, given = block.text("id"), block.text("name"), block.take("input")
                if not isinstance(given, Mapping):
                    raise bad(f"{block.where}.input", f"is {short(given)}", "send an object")
                self.call(identity, name, encoded(given).decode())
            case "tool_result":
                identity, content = block.text("tool_use_id"), block.take("content")
                text = _texts(content, f"{block.where}.content", marks) if content is not None else ""
                text = f"Error: {text}" if block.flag("is_error") else text
                self.result(identity, text, f"{block.where}.tool_use_id", "tool_use", "send its id")
        marks.append(take_mark(block))
        block.end()
        for seconds in marks:
            if seconds is not None:
                self._mark(seconds, self.beginning())

    def _mark(self, seconds: float, messages: list[dict[str, Any]]) -> None:
        """Each copies all before it: whoever sends thousands is told at the first too many."""
        self.marks.append(Mark(seconds, messages))
        check_number(self.marks)


def _grow(said: dict[str, Any], name: str, text: str) -> None:
    """Add a text to a message's, in a line of its own."""
    grown, said[name] = said.get(name) or "", ""
    if grown:
        grown += "\n"
    grown += text  # in place, as nobody else has it: of a row of many messages not all are copied with each
    said[name] = grown


def _texts(content: Any, where: str, marks: list[float | None]) -> str:
    """A text, or those of blocks, whose marks are added to `marks`."""
    return texts(content, where, "text", "send a text, or a list of text blocks", partial(_rest_of_text, marks))


def _rest_of_text(marks: list[float | None], block: JSONObject) -> None:
    marks.append(take_mark(block))
    _no_citations(block)


def _no_citations(block: JSONObject) -> None:
    if block.take("citations"):
        raise bad(f"{block.where}.citations", "is not supported", "leave it out")
