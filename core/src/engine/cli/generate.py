"""`engine generate PROMPT`: text to the terminal as it comes."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TextIO

from engine.cli.flags import add_engine_flags, merged_settings
from engine.cli.sampling_flags import add_sampling_flags, sampling_keywords
from engine.plugin.command import Command
from engine.types.errors import InvalidRequestError

if TYPE_CHECKING:
    from engine.llm import LLMEngine
    from engine.types.params import SamplingParams

_REQUEST_ID = "generate"


class Generate(Command):
    """Generate text from one prompt with the engine in this process."""

    help = "Generate text from a prompt, streamed to the terminal as it comes."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "prompt", nargs="?", metavar="PROMPT", help="the text to go on from (default: standard input)"
        )
        add_sampling_flags(parser)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        prompt = _prompt(arguments, sys.stdin)
        merged = merged_settings(arguments)
        for warning in merged.warnings:
            print(f"warning: {warning}", file=sys.stderr)

        # Only now is anything heavy imported: mistakes in the command line are answered at once.
        from engine.config.settings import EngineConfig
        from engine.llm import LLMEngine
        from engine.types.params import SamplingParams

        config = EngineConfig.from_merged(merged)
        keywords = sampling_keywords(arguments)
        if "seed" in merged.section("settings"):
            keywords["seed"] = config.seed
        engine = LLMEngine.from_engine_args(config)
        try:
            stream(engine, prompt, SamplingParams(**keywords), sys.stdout)
        finally:
            shutdown = getattr(engine, "shutdown", None)
            if shutdown is not None:
                shutdown()
        return 0


def stream(engine: LLMEngine, prompt: str, params: SamplingParams, out: TextIO) -> None:
    """Generate and write the text to `out` as it comes, with a newline at the end.

    Raises:
        EngineError: the prompt or a parameter is refused, or generation failed.
    """
    engine.add_request(_REQUEST_ID, prompt, params)
    written = 0
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                text = output.outputs[0].text
                out.write(text[written:])
                written = len(text)
            out.flush()
    finally:
        if written:
            out.write("\n")
            out.flush()


def _prompt(arguments: argparse.Namespace, source: TextIO) -> str:
    prompt: str | None = getattr(arguments, "prompt", None)
    if prompt is not None:
        return prompt
    if source.isatty():
        raise InvalidRequestError(
            "generate text", "there is no prompt", 'write one, as in: engine generate "Once upon a time"'
        )
    return source.read()
