"""`engine generate`: one prompt, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TextIO

from engine.plugin.card import Command
from engine.types.errors import InvalidRequestError
from engine_chat.answers import printable, why_empty
from engine_chat.sampling_flags import DEFAULT_MAX_TOKENS, add_sampling_flags, sampling_keywords
from engine_kit.flags import add_engine_flags, command_settings

if TYPE_CHECKING:
    from engine.embedding import LLMEngine, Prompt
    from engine.types.outputs import CompletionOutput
    from engine.types.params import SamplingParams

_REQUEST_ID = "generate"


class GenerateCommand(Command):
    """Generate text with the engine in this process."""

    help = "Generate text from a prompt, streamed to the terminal as it comes."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "prompt", nargs="*", metavar="PROMPT", help="the text to go on from (default: all of standard input)"
        )
        parser.add_argument(
            "--chat", action="store_true", help="put each text through the model's chat template, as a user's message"
        )
        add_sampling_flags(parser)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        prompt = _prompt(arguments, sys.stdin)
        merged = command_settings(arguments)

        # Only now is anything heavy imported: mistakes in the command line are answered at once.
        from engine.embedding import EngineConfig
        from engine.types.params import SamplingParams

        config = EngineConfig.from_merged(merged)
        keywords = sampling_keywords(arguments)
        SamplingParams(**({"max_tokens": None} | keywords)).verify()
        if "seed" in merged.section("settings"):
            keywords["seed"] = config.seed
        from engine.embedding import LLMEngine

        engine, chat = LLMEngine.from_engine_args(config), hasattr(arguments, "chat")
        params = SamplingParams(**({"max_tokens": DEFAULT_MAX_TOKENS} | engine.sampling_defaults.params | keywords))
        try:
            ended = stream(engine, as_message(engine, prompt) if chat else prompt, params, sys.stdout)
            if not ended.text.strip():
                print(f"note: {_empty(engine, ended, chat)}", file=sys.stderr)
        finally:
            engine.shutdown()
        return 0


def as_message(engine: LLMEngine, prompt: str) -> Prompt:
    """The prompt as a user's message, by the chat template. Raises TokenizerError where there is none."""
    return engine.frontend.inputs.render_chat([{"role": "user", "content": prompt}])


def _empty(engine: LLMEngine, ended: CompletionOutput, chat: bool) -> str:
    """Why an answer has no text, and what to do."""
    why, by_model = why_empty(ended.finish_reason, ended.stop_reason)
    if not by_model:
        return f"the answer is empty: {why}"
    remedy = "--min-tokens N has it go on"
    if not chat and engine.plan is not None and engine.plan.has_chat_template:
        remedy = f"a question wants --chat, which puts it through the model's chat template; {remedy}"
    return f"the answer is empty: {why}; {remedy}"


def stream(engine: LLMEngine, prompt: Prompt, params: SamplingParams, out: TextIO) -> CompletionOutput:
    """Generate and write the text to `out` as it comes, with a newline at the end.

    Returns:
        The whole completion.

    Raises:
        EngineError: the prompt or a parameter is refused, or generation failed.
    """
    shown = printable if out.isatty() else str
    engine.add_request(_REQUEST_ID, prompt, params)
    written, completion = 0, None
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                completion = output.outputs[0]
                out.write(shown(completion.text[written:]))
                written = len(completion.text)
            out.flush()
    finally:
        if written:
            out.write("\n")
            out.flush()
    assert completion is not None, "a request that ended has told so"
    return completion


def _prompt(arguments: argparse.Namespace, source: TextIO) -> str:
    prompts: list[str] = getattr(arguments, "prompt", [])
    if len(prompts) > 1:
        raise InvalidRequestError(
            f"generate from {prompts[0]!r} and {prompts[1]!r}",
            "it is a second prompt",
            "put a prompt of several words in quotes; many are for `engine run-batch`",
        )
    if prompts:
        return prompts[0]
    if source.isatty():
        raise InvalidRequestError(
            "generate text", "there is no prompt", 'write one, as in: engine generate "Once upon a time"'
        )
    prompt = source.read()
    if not prompt.strip():
        raise InvalidRequestError(
            "generate from standard input", "it is empty", 'write a prompt, as in: engine generate "Once upon a time"'
        )
    return prompt
