"""The body of `/v1/responses`. What is not named here is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.types.params import SamplingDefaults, SamplingParams
from engine.types.structured_outputs import StructuredOutputsParams
from engine_server.bodies import Body, Effort, Metadata, Objects, Salt, sampling_params


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


class ResponsesBody(Body):
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
        max_output_tokens: the most tokens of the answer, thoughts included; without it, what fits the context.
        truncation: only "disabled": a conversation that is too long is refused.
        metadata: up to 16 texts by name, given back with the response.
        reasoning: how the model thinks.
        service_tier: "auto" or "default": all requests are served alike, as the response says.
        user, safety_identifier: the client's name for its own user, given back, which stands in the access log.
        prompt_cache_key: given back; what it asks for is so anyway: prompts that begin alike are found in the cache.
        cache_salt: ours: requests with another find none of each other's cached pages.
        background: answer at once, and compute the response whether or not somebody waits; not without store. With
            stream its events are kept, too.
        include: only an empty list.
        seed, top_k, min_p, repetition_penalty, priority, timeout, chat_template_kwargs: ours, as with chat completions.
    """

    model: str | None = None
    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    truncation: Literal["disabled"] | None = None
    metadata: Metadata | None = None
    reasoning: Reasoning | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Salt | None = None
    background: bool | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    priority: int = 0
    timeout: float | None = None
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
