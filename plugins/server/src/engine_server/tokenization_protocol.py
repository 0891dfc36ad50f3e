"""The bodies of `/tokenize` and `/detokenize`. What is not named here is refused by name, never ignored."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from engine_server.body_model import Body
from engine_server.protocol import Integers, Objects


class TokenizeBody(Body):
    """`POST /tokenize`: of a text, or of a conversation.

    Args:
        model: one of the served names.
        prompt: a text.
        messages: a conversation, rendered by the model's chat template.
        add_special_tokens: put those around it that the tokenizer puts there; without it, true for a text and false for
            a conversation, whose template has written them.
        return_token_strs: answer with the text of each token too.
        add_generation_prompt: end the prompt where the assistant begins.
        continue_final_message: the last message, the assistant's, is the beginning of the answer.
        chat_template_kwargs: further variables for the template.
        tools: functions that the template shows to the model, in OpenAI's form.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None

    @model_validator(mode="after")
    def _text_or_conversation(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send prompt or messages, one of them")
        if self.prompt is not None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for messages; leave it out")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other; send one of them")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`.

    Args:
        model: one of the served names.
        tokens: token ids.
    """

    model: str | None = None
    tokens: Integers
