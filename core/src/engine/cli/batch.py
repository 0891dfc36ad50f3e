"""Many prompts: from a file of lines, through one engine, to a file with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TextIO, cast

from engine.cli.batch_lines import BadLine, Line
from engine.frontend.interrupt import DeferredInterrupt
from engine.frontend.progress import Progress
from engine.frontend.request_state import OutputKind
from engine.llm import LLMEngine
from engine.types.errors import EngineDeadError, EngineError
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.params import SamplingParams


class Batch:
    """Answers every line, and writes the results in the order of the lines, each as soon as those before it are there.

    Args:
        engine: at work, and idle.
        lines: what is asked.
        sampling: parameters of those lines that do not set them, by their names in `SamplingParams`.
        out: gets one JSON object a line.
        at_once: most requests that are queued at a time.
        chat: a text goes through the chat template, as a user's message.

    Attributes:
        failed: (line's number, error) of lines that failed. Each has a result too, with "error" in place of a text.
    """

    def __init__(
        self,
        engine: LLMEngine,
        lines: Sequence[Line | BadLine],
        sampling: dict[str, Any],
        out: TextIO,
        at_once: int,
        *,
        chat: bool = False,
    ) -> None:
        self._engine, self._lines, self._sampling = engine, lines, sampling
        self._out, self._at_once, self._chat = out, at_once, chat
        self.failed: list[tuple[int, EngineError]] = []
        self._running: dict[str, int] = {}
        self._results: dict[int, dict[str, Any]] = {}
        self._begun = self._written = 0

    def run(self, bar: Callable[..., Any] | bool = True) -> None:
        """Do it; `bar` as `use_tqdm` of `LLM.generate`.

        Raises:
            EngineDeadError, KeyboardInterrupt: what was complete is written.
        """
        with DeferredInterrupt() as interrupt, Progress(bar, len(self._lines)) as progress:
            try:
                while self._begun < len(self._lines) or self._running:
                    while self._begun < len(self._lines) and len(self._running) < self._at_once:
                        self._begin(self._begun, progress)
                        self._begun += 1
                    for output in self._engine.step():
                        self._end(self._running.pop(output.request_id), result(output), output.error)
                        progress.advance(output)
                    self._out.flush()
                    interrupt.check()
            except EngineDeadError:
                raise
            except BaseException:
                self._engine.abort_request(self._running)
                raise

    def _begin(self, index: int, progress: Progress) -> None:
        line, request_id = self._lines[index], f"line-{index}"
        try:
            if isinstance(line, BadLine):
                raise line.error
            params = SamplingParams(**{**self._sampling, **line.sampling})
            prompt, messages = cast(Any, line.prompt), line.messages
            if self._chat and isinstance(prompt, str):
                messages = [{"role": "user", "content": prompt}]
            if messages is not None:
                prompt = self._engine.frontend.inputs.chat.render(messages)
            self._engine.add_request(request_id, prompt, params, output_kind=OutputKind.FINAL)
            self._running[request_id] = index
        except EngineDeadError:
            raise
        except EngineError as error:
            refused = RequestOutput(request_id, None, [], [], finished=True, error=error)
            self._end(index, result(refused), error)
            progress.advance(refused)

    def _end(self, index: int, content: dict[str, Any], error: EngineError | None) -> None:
        line = self._lines[index]
        identity = {"id": line.identity} if isinstance(line, Line) and line.identity is not None else {}
        self._results[index] = {"line": line.number, **identity, **content}
        if error is not None:
            self.failed.append((line.number, error))
        while self._written in self._results:
            text = json.dumps(self._results.pop(self._written), ensure_ascii=False)
            # An "id" can hold half a surrogate pair, which is no UTF-8 but may be escaped.
            self._out.write(text.encode("utf-8", "backslashreplace").decode() + "\n")
            self._written += 1


def result(output: RequestOutput) -> dict[str, Any]:
    """What is written of a request: its text, or a list of "outputs" for n > 1, or its "error"; and token counts."""
    if output.error is not None:
        code, asked, found, remedy = output.error.parts
        message = str(output.error)
        return {"error": {"code": code, "message": message, "asked": asked, "found": found, "remedy": remedy}}
    completions = [_completion(completion) for completion in output.outputs]
    shown = completions[0] if len(completions) == 1 else {"outputs": completions}
    counts = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(completion.token_ids) for completion in output.outputs),
        "cached_tokens": output.num_cached_tokens,
    }
    return {**shown, **counts}


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    content: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
    if completion.stop_reason is not None:
        content["stop_reason"] = completion.stop_reason
    if completion.logprobs is not None:
        content["logprobs"] = [
            [{"token_id": token, "token": one.decoded_token, "logprob": one.logprob} for token, one in position.items()]
            for position in completion.logprobs
        ]
    return content
