"""`engine generate`: one prompt, streamed to the terminal; or many from a file, with results as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from engine.cli.empty_answer import why_empty
from engine.cli.flags import add_engine_flags, command_settings
from engine.cli.sampling_flags import DEFAULT_MAX_TOKENS, add_sampling_flags, sampling_keywords
from engine.cli.terminal import printable
from engine.plugin.card import Command
from engine.types.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from engine.cli.batch_lines import BadLine, Line
    from engine.frontend.prompts import Prompt
    from engine.llm import LLMEngine
    from engine.types.outputs import CompletionOutput
    from engine.types.params import SamplingParams

_REQUEST_ID = "generate"
_QUEUED_PER_PLACE = 2
"""Requests of a batch that are queued for each that can run: the next is there when one ends."""
_SHOWN_FAILURES = 3

_EPILOG = """\
With --input, every line is a request of its own: plain text, or a JSON object with "prompt", "prompt_token_ids" or
"messages", an "id" to find the result by, and sampling parameters that go before the flags ("temperature", "seed",
"n", ...). The results are JSON objects, one a line, in the order of the lines: "text", "finish_reason", token counts;
or "error", where a request failed. The others go on, and the exit code is 2 at the end."""


class Generate(Command):
    """Generate text with the engine in this process."""

    help = "Generate text from a prompt, streamed to the terminal as it comes, or from a file of prompts."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.add_argument(
            "prompt", nargs="?", metavar="PROMPT", help="the text to go on from (default: all of standard input)"
        )
        files = parser.add_argument_group("files")
        files.add_argument("--input", metavar="FILE", help="one request a line, text or JSON; - is standard input")
        files.add_argument("--output", metavar="FILE", help="where results go, as JSON lines; - is standard output")
        files.add_argument(
            "--input-format",
            choices=("text", "jsonl"),
            help="what the lines are (default: by the file's name, else by its first line)",
        )
        parser.add_argument(
            "--chat", action="store_true", help="put each text through the model's chat template, as a user's message"
        )
        add_sampling_flags(parser)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        lines = _batch(arguments)
        prompt = _prompt(arguments, sys.stdin) if lines is None else ""
        merged = command_settings(arguments)

        # Only now is anything heavy imported: mistakes in the command line are answered at once.
        from engine.config.settings import EngineConfig
        from engine.types.params import SamplingParams

        config = EngineConfig.from_merged(merged)
        keywords = sampling_keywords(arguments)
        SamplingParams(**({"max_tokens": None} | keywords)).verify()
        if "seed" in merged.section("settings") and not hasattr(arguments, "input"):
            keywords["seed"] = config.seed
        with _open_output(arguments) as out:
            from engine.llm import LLMEngine

            engine, chat = LLMEngine.from_engine_args(config), hasattr(arguments, "chat")
            keywords = {"max_tokens": DEFAULT_MAX_TOKENS} | engine.sampling_defaults.params | keywords
            try:
                if lines is not None:
                    at_once = _QUEUED_PER_PLACE * config.max_num_seqs * config.data_parallel_size
                    return _run_batch(engine, lines, keywords, out, at_once, chat)
                ended = stream(engine, as_message(engine, prompt) if chat else prompt, SamplingParams(**keywords), out)
                if not ended.text.strip():
                    print(f"note: {_empty(engine, ended, chat)}", file=sys.stderr)
            finally:
                engine.shutdown()
        return 0


def as_message(engine: LLMEngine, prompt: str) -> Prompt:
    """The prompt as a user's message, by the chat template. Raises TokenizerError where there is none."""
    return engine.frontend.inputs.chat.render([{"role": "user", "content": prompt}])


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


def _run_batch(
    engine: LLMEngine,
    lines: Sequence[Line | BadLine],
    sampling: dict[str, Any],
    out: TextIO,
    at_once: int,
    chat: bool,
) -> int:
    from engine.cli.batch import Batch

    batch = Batch(engine, lines, sampling, out, at_once, chat=chat)
    batch.run(_bar)
    for number, error in sorted(batch.failed, key=lambda failure: failure[0])[:_SHOWN_FAILURES]:
        place = f"line {number}"
        print(f"error: {'' if error.asked == place else place + ': '}{error}", file=sys.stderr)
    if batch.failed:
        print(f"{len(batch.failed)} of {len(lines)} requests failed; their results have the reason", file=sys.stderr)
    return 2 if batch.failed else 0


def _bar(**options: Any) -> Any:
    """tqdm's bar, where standard error is a terminal."""
    from tqdm import tqdm

    return tqdm(**options, file=sys.stderr, disable=None)


def _batch(arguments: argparse.Namespace) -> list[Line | BadLine] | None:
    """The requests of --input, or of a prompt whose result goes to --output; None where a prompt is streamed."""
    path, prompt = getattr(arguments, "input", None), getattr(arguments, "prompt", None)
    if path is None:
        if hasattr(arguments, "input_format"):
            raise ConfigError("generate with --input-format", "there is no --input", "name a file, or leave it out")
        if not hasattr(arguments, "output"):
            return None
        from engine.cli.batch_lines import Line

        return [Line(1, prompt=_prompt(arguments, sys.stdin))]
    if prompt is not None:
        raise ConfigError(f"generate from --input {path!r} and from a prompt", "there are both", "give one of them")
    from engine.cli.batch_lines import choose_format, holds_objects, parse_lines

    text, asked = _read(path), f"generate from --input {path!r}"
    form = getattr(arguments, "input_format", None) or choose_format(path, text)
    lines = parse_lines(text, form)
    if not lines:
        raise InvalidRequestError(asked, "it is empty", "write one request a line")
    if form == "jsonl" and not holds_objects(text):
        remedy = "pass --input-format text where its lines are prompts, or write one JSON object a line"
        raise InvalidRequestError(asked, f"none of its {len(lines)} lines is a JSON object", remedy)
    return lines


def _read(path: str) -> str:
    asked = f"read --input {path!r}"
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise InvalidRequestError(asked, error.strerror or str(error), "check the path") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(asked, f"it is no UTF-8 text: {error}", "convert it to UTF-8") from error


def _open_output(arguments: argparse.Namespace) -> AbstractContextManager[TextIO]:
    path = getattr(arguments, "output", "-")
    if path == "-":
        return contextlib.nullcontext(sys.stdout)
    asked = f"write --output {path!r}"
    source = getattr(arguments, "input", "-")
    if source != "-" and Path(path).exists() and Path(path).samefile(source):
        raise ConfigError(asked, "it is the --input, which would be lost", "name another file")
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(asked, error.strerror or str(error), "check the path") from error


def _prompt(arguments: argparse.Namespace, source: TextIO) -> str:
    prompt: str | None = getattr(arguments, "prompt", None)
    if prompt is not None:
        return prompt
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
