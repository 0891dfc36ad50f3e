"""The bodies of OpenAI's routes, of requests and of answers that do not stream. What is not named here is refused by
name, never ignored."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, model_validator

from engine.embedding import Prompt
from engine.types.structured_outputs import StructuredOutputsParams
from engine_server.bodies import (
    Answer,
    Body,
    Effort,
    GeneratingBody,
    Inputs,
    Integers,
    Metadata,
    Objects,
    Strings,
    Truncation,
    Usage,
    check_special_tokens,
    prompts_of,
    several,
)

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class JSONSchema(Body):
    """What `json_schema` holds.

    Args:
        name, description: for the model's maker; the schema is enforced whatever they are.
        schema: the schema; without one, any JSON object.
        strict: taken, and the schema is enforced with and without it: what cannot be enforced is refused.
    """

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _name_fits(self) -> JSONSchema:
        if not _NAME.fullmatch(self.name):
            raise ValueError("the name must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -")
        return self


class ResponseFormat(Body):
    """What the answer must be.

    Args:
        type: free text, some JSON object, JSON of a schema, or (XGrammar's and vLLM's) a structural tag.
        json_schema: with the type of that name.
        format: of a structural tag; structures, triggers: of one in its older form.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema and the type of that name go together")
        parts = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        given = [name for name, part in parts.items() if part is not None]
        if self.type != "structural_tag" and given:
            raise ValueError(f"{given[0]} goes with the type structural_tag")
        if self.type == "structural_tag" and given not in (["format"], ["structures", "triggers"]):
            raise ValueError("a structural_tag has a format, or structures and triggers")
        return self

    def constraint(self) -> StructuredOutputsParams | None:
        """The same for the engine; None for free text."""
        match self.type:
            case "text":
                return None
            case "json_schema" if self.json_schema is not None and self.json_schema.schema_ is not None:
                return StructuredOutputsParams(json=self.json_schema.schema_, asked_as="response_format")
            case "structural_tag":
                tag = json.dumps(self.model_dump(exclude_none=True))
                return StructuredOutputsParams(structural_tag=tag, asked_as="response_format")
        return StructuredOutputsParams(json_object=True, asked_as="response_format")


class StreamOptions(Body):
    """How to stream.

    Args:
        include_usage: send one more event before the end, with the token counts and no choices.
        continuous_usage_stats: send token counts with every event: of the prompt, and of its choice as far as it goes.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputsBody(Body):
    """A constraint on the output. Exactly one, which `StructuredOutputsParams.verify` checks."""

    choice: Strings | None = None
    regex: str | None = None
    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class SamplingBody(GeneratingBody):
    """What completions and chat have in common.

    `user`, the client's name for its own user, stands in the access log. With `truncate_prompt_tokens` only the last so
    many tokens of a prompt are taken; -1: as many as fit. With `return_token_ids` the answer tells the token ids too,
    `prompt_token_ids` and each choice's `token_ids`; with `return_tokens_as_token_ids` log probabilities call a token
    "token_id:17" in place of its text. What OpenAI does not name is ours; clients send it as `extra_body`.
    """

    stream_options: StreamOptions | None = None
    user: str | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | Strings | None = None
    stop_token_ids: Integers | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, Any] | None = None
    bad_words: Strings | None = None
    allowed_token_ids: Integers | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Truncation | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    extra_args: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsBody | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        if self.vllm_xargs is not None:
            if self.extra_args is not None:
                raise ValueError("vllm_xargs is another name of extra_args; send one of them")
            self.extra_args = self.vllm_xargs
        if None not in (self.response_format, self.structured_outputs):
            raise ValueError("response_format and structured_outputs are two constraints; send one of them")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not allowed with stream=true")
        if self.return_tokens_as_token_ids and not self.logprobs_asked():
            raise ValueError("return_tokens_as_token_ids is about logprobs, and none are asked for; ask for logprobs")
        return self

    def logprobs_asked(self) -> bool:
        """Whether log probabilities of the output are asked for."""
        raise NotImplementedError

    def constraint(self) -> StructuredOutputsParams | None:
        """On the output; None where there is none."""
        if self.structured_outputs is not None:
            return StructuredOutputsParams(**self.structured_outputs.model_dump(by_alias=True))
        return None if self.response_format is None else self.response_format.constraint()


class CompletionBody(SamplingBody):
    """`POST /v1/completions`.

    Args:
        prompt: a text, token ids, or a list of either; may be left out where there are `prompt_embeds`.
        prompt_embeds: embeddings in place of tokens: base64 of a safetensors file with one tensor [n, hidden_size], or
            several of them; each is a prompt of its own, and the answer has them first.
        max_tokens: OpenAI's default is 16; 0: only the prompt is brought to the device.
        logprobs: how many alternatives for each position.
        echo: put the prompt before the completion.
        best_of: how many completions to make, of which the n most likely are returned; not with stream.
        add_special_tokens: put those around texts that the tokenizer puts there; not for token ids.
    """

    prompt: Inputs = Field(default_factory=list)
    prompt_embeds: str | Strings | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _fields_fit_the_prompts(self) -> CompletionBody:
        check_special_tokens(self.add_special_tokens, several(self.prompt))
        alone = bool(self.prompt_embeds) and self.prompt == []
        for name in ("add_special_tokens", "truncate_prompt_tokens") if alone else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is for texts and token ids; leave it out")
        if self.prompt_embeds and self.echo:
            raise ValueError("echo is for texts and token ids, and prompt_embeds are neither; leave one of them out")
        return self

    def logprobs_asked(self) -> bool:
        return self.logprobs is not None

    def embeds(self) -> list[str]:
        """One entry for each of `prompt_embeds`."""
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []

    def prompts(self) -> list[Prompt]:
        """One entry for each prompt, as the engine takes it, those of `embeds` not among them."""
        return prompts_of(several(self.prompt), self.add_special_tokens, self.truncate_prompt_tokens)


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`.

    Args:
        messages: as the model's chat template takes them.
        max_tokens, max_completion_tokens: the same; without either, what fits the context; 0: only the prompt
            is brought to the device.
        logprobs, top_logprobs: whether, and with how many alternatives.
        add_generation_prompt: end the prompt where the assistant begins.
        continue_final_message: the last message, the assistant's, is the beginning of the answer.
        add_special_tokens: let the tokenizer put its own around what the template has written; without it, not.
        documents: what the template shows to the model beside the conversation, where it does.
        chat_template_kwargs: further variables for the template.
        tools: functions that the model may call, in OpenAI's form.
        tool_choice: "none", "auto", "required", or one of them by name.
        parallel_tool_calls: whether it may call several at once.
        metadata: up to 16 texts by name, given back with the answer.
        thinking_token_budget: thoughts that have not ended after so many tokens of the output are ended.
        reasoning_effort: how much the model thinks, where its chat template takes that.
        service_tier: "auto" or "default": all requests are served alike, as the answer says where it was sent.
        safety_identifier: as `user`, which goes before it.
        include_reasoning: false leaves thoughts out of the answer; they are thought, and counted, nevertheless.
        return_prompt_text: answer with `prompt_text` too, the conversation as the chat template has written it.
        prompt_cache_key: what it asks for is so in any case: prompts that begin alike are found in the cache.
        store: only false: completions are not kept (responses are).
    """

    messages: Annotated[list[dict[str, Any]], FailFast()]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    include_reasoning: bool = True
    return_prompt_text: bool = False
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        asked = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and asked:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other; send one of them")
        return self

    def logprobs_asked(self) -> bool:
        return self.logprobs


FinishReason = Literal["stop", "length", "tool_calls", "abort"]
PromptLogprobs = list[dict[str, Any] | None]


class FunctionCall(Answer):
    """A function, and the JSON of its arguments."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Answer):
    """What the model says: thoughts where they are told apart, calls where there are some."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)


class ChatChoice(Answer):
    """One of the answers; `token_ids` with `return_token_ids`."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] = Field(default_factory=list)


class ChatCompletion(Answer):
    """`POST /v1/chat/completions`; what the body asks for comes beside the choices."""

    id: str
    created: int
    model: str
    service_tier: str = ""
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default_factory=list)
    prompt_text: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionChoice(Answer):
    """One of the completions; ids with `return_token_ids`."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] = Field(default_factory=list)
    prompt_token_ids: list[int] = Field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    """`POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | None = None
