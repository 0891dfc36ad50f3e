"""What OpenAI's routes answer, where they do not stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engine_server.bodies import Answer
from engine_server.usage import Usage

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


class Model(Answer):
    """A name under which the model is served; `root` is the first."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    default_sampling_params: dict[str, Any]


class Models(Answer):
    """All of them."""

    object: Literal["list"]
    data: list[Model]
