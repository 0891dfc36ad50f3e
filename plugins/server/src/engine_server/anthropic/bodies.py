"""The bodies of Anthropic's routes. What is not named here is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.types.params import SamplingDefaults, SamplingParams
from engine.types.structured_outputs import StructuredOutputsParams
from engine_server.bodies import Body, Objects, Salt, Strings, sampling_params


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


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`.

    Args:
        max_tokens: the most tokens of the answer, thoughts included.
        stop_sequences: texts that end the answer, and are left out of it.
        metadata: about the request.
        service_tier: all requests are served alike, as the answer's `usage` says: "standard".
        cache_salt: ours: requests with another find none of each other's cached pages.
        seed, min_p, repetition_penalty, priority, timeout: ours, as with chat completions.
    """

    max_tokens: int
    stream: bool = False
    stop_sequences: Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_salt: Salt | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    priority: int = 0
    timeout: float | None = None

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
