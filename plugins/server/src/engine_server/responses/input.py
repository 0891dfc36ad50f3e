"""The body of `/v1/responses`, and from its items and tools to a `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.interfaces.tool_parser import FunctionTool
from engine.types.params import SamplingDefaults, SamplingParams
from engine.types.structured_outputs import StructuredOutputsParams
from engine_server.bodies import Body, Effort, GeneratingBody, Metadata, Objects
from engine_server.conversation.reading import JSONObject, Messages, bad, texts
from engine_server.conversation.tools import Choice, ToolRequest, chat_form, check_chosen, function_tool, read_tools
from engine_server.conversation.turn import Conversation
from engine_server.errors import APIError
from engine_server.state import sampling_params


class TextFormat(Body):
    """What the answer must be.

    Args:
        type: free text, some JSON object, or JSON of a schema.
        schema: with the type `json_schema`; enforced by the grammar at work.
        name, description: of a schema, for the model's maker.
        strict: taken: schemas are enforced with and without it.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> TextFormat:
        given = [self.name, self.description, self.schema_, self.strict]
        if self.type != "json_schema" and given != [None] * 4:
            raise ValueError("name, description, schema and strict go with the type json_schema")
        if self.type == "json_schema" and None in (self.name, self.schema_):
            raise ValueError("a json_schema has a name and a schema")
        return self

    def dumped(self) -> dict[str, Any]:
        """As it was sent."""
        return self.model_dump(by_alias=True, exclude_none=True)


class TextConfig(Body):
    """About the answer's text.

    Args:
        format: what it must be; without one, any text. Where calls of tools may come, it is this or calls.
    """

    format: TextFormat | None = None


class ResponseStreamOptions(Body):
    """How to stream.

    Args:
        include_obfuscation: only false: events are not padded.
    """

    include_obfuscation: Literal[False] = False


class Reasoning(Body):
    """How the model thinks.

    Args:
        effort: how much, where its chat template takes that.
    """

    effort: Effort | None = None


class ResponsesBody(GeneratingBody):
    """`POST /v1/responses`.

    Args:
        input: a text, or items: messages, `function_call`, `function_call_output`, `reasoning`.
        instructions: what the system says; of this response alone.
        previous_response_id: goes on from a stored response.
        store: keep the response, so that it can be got and gone on from; true where the server stores any.
        tools: functions that the model may call.
        tool_choice: "none", "auto", "required", or one of them by name.
        parallel_tool_calls: whether it may call several at once.
        text: what the answer must be.
        max_output_tokens: the most tokens of the answer, thoughts included; without it, what fits the context;
            0: only the prompt is brought to the device.
        truncation: only "disabled": a conversation that is too long is refused.
        metadata: up to 16 texts by name, given back with the response.
        reasoning: how the model thinks.
        service_tier: "auto" or "default": all requests are served alike, as the response says.
        user, safety_identifier: the client's name for its own user, given back, which stands in the access log.
        prompt_cache_key: given back; what it asks for is so anyway: prompts that begin alike are found in the cache.
        background: answer at once, and compute the response whether or not somebody waits; not without store. With
            stream its events are kept, too.
        include: only an empty list.
        cache_salt, seed, top_k, min_p, repetition_penalty, priority, timeout, chat_template_kwargs: ours, as with chat
            completions.
    """

    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: Annotated[int, Field(ge=0)] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: Metadata | None = None
    reasoning: Reasoning | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    background: bool | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> ResponsesBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        return self

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """The request's parameters over the model's; the engine verifies them."""
        form = None if self.text is None else self.text.format
        constraint: StructuredOutputsParams | None = None
        if form is not None and form.type == "json_object":
            constraint = StructuredOutputsParams(json_object=True, asked_as="text")
        elif form is not None and form.schema_ is not None:
            constraint = StructuredOutputsParams(json=form.schema_, asked_as="text")
        return sampling_params(self, defaults, self.max_output_tokens, structured_outputs=constraint)


Item = Mapping[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_CHOICES: dict[str, Choice] = {"none": "none", "auto": "auto", "required": "required"}
_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def items_of(body: ResponsesBody) -> list[Item]:
    """What the request itself says, as items."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    if not body.input:
        raise bad("input", "is empty", "send a text, or at least one item")
    return list(body.input)


def conversation(body: ResponsesBody, before: Sequence[Item], items: Sequence[Item]) -> Conversation:
    """A request's conversation, of its own items and of those `before`, of the responses that it goes on from.

    Raises APIError, a 400 that says where.
    """
    read = _ItemsReader()
    if body.instructions is not None:
        read.row.append({"role": "system", "content": body.instructions})
    for item in before:
        read.take(JSONObject(item, "previous_response_id"))
    for i, item in enumerate(items):
        read.take(JSONObject(item, f"input.{i}"))
    return Conversation(
        messages=read.row, tools=tool_request(body), variables=body.chat_template_kwargs, model=body.model
    )


def tool_request(body: ResponsesBody) -> ToolRequest:
    """What a body says of tools."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice", f"is {short(choice)}, and there are no tools", "send tools")
        return ToolRequest()
    tools = read_tools(body.tools, _tool)
    given, parallel = chat_form(tools), body.parallel_tool_calls is not False
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return ToolRequest(tools, given, _CHOICES[choice or "auto"], "", parallel)
    if not isinstance(choice, Mapping):
        hint = 'send "none", "auto", "required" or {"type": "function", "name": "..."}'
        raise bad("tool_choice", f"is {short(choice)}", hint)
    fields = JSONObject(choice, "tool_choice")
    fields.one_of("type", ("function",))
    name = fields.text("name")
    fields.end()
    return ToolRequest(tools, given, "named", check_chosen(name, tools), parallel)


def _tool(i: int, tool: Mapping[str, Any]) -> FunctionTool:
    fields = JSONObject(tool, f"tools.{i}")
    if (kind := fields.take("type")) != "function":
        found = "is missing" if kind is None else f"is {short(kind)}"
        raise bad(f"{fields.where}.type", found, 'send "function": this server has no tools of its own')
    return function_tool(fields.left, fields.where)


class _ItemsReader(Messages):
    """Reads items one after another. What the assistant thinks, says and calls in one turn becomes one message."""

    def take(self, item: JSONObject) -> None:
        """One item. Its id and status, which answers have, say nothing to the model."""
        for name in ("id", "status"):
            if not isinstance(value := item.take(name), str | None):
                raise bad(f"{item.where}.{name}", f"is {short(value)}", "send a text, or leave it out")
        match item.take("type") or "message":
            case "message":
                role = item.one_of("role", _ROLES)
                text = _texts(item, "content", "output_text" if role == "assistant" else "input_text")
                last = self.row[-1] if self.row else {}
                thinks = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
                if role == "assistant" and thinks:
                    last["content"] = text
                else:
                    self.row.append({"role": role, "content": text})
            case "function_call":
                self.call(item.text("call_id"), item.text("name"), item.text("arguments"))
            case "function_call_output":
                identity, text = item.text("call_id"), _texts(item, "output", "input_text")
                remedy = "send the call too, or previous_response_id"
                self.result(identity, text, f"{item.where}.call_id", "function_call", remedy)
            case "reasoning":
                if "summary" in item.left:  # beside the thoughts themselves it says nothing more
                    _texts(item, "summary", "summary_text")
                if "content" in item.left:
                    text = _texts(item, "content", "reasoning_text")
                    self.row.append({"role": "assistant", "content": "", "reasoning_content": text})
            case kind:
                raise bad(f"{item.where}.type", f"is {short(kind)}", f"send one of {', '.join(_TYPES)}")
        item.end()


def _texts(item: JSONObject, field: str, kind: str) -> str:
    where = f"{item.where}.{field}"
    return texts(item.take(field), where, kind, "send a text, or a list of parts", _rest_of_text)


def _rest_of_text(part: JSONObject) -> None:
    if part.take("annotations") or part.take("logprobs"):
        found, param = f"{part.where}: annotations and logprobs are not supported", part.where.partition(".")[0]
        raise APIError(400, f"{found}; leave them out", param=param, code="unsupported_parameter")
