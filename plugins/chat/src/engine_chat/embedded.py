"""An engine in this process answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from engine.embedding import LLMEngine, OutputKind
from engine.types.outputs import RequestOutput
from engine.types.params import SamplingParams
from engine_chat.backend import Message, Piece
from engine_kit.deferred_interrupt import DeferredInterrupt

PATIENCE = 2
"""Ctrl-C's that wait for the end of a step; one more leaves the program in the middle of it."""
INTERRUPTED = 130


class EmbeddedBackend:
    """Makes the engine's steps itself, so that Ctrl-C falls between two of them.

    Args:
        engine: at work; closed with this object.
        params: of every answer.

    Raises TokenizerError where the model has no chat template: better now than at the first question.
    """

    def __init__(self, engine: LLMEngine, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params
        self._ids = itertools.count()
        self.limited = params.max_tokens is not None
        params.verify()
        engine.frontend.inputs.render_chat([{"role": "user", "content": "?"}])

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        engine, request_id = self._engine, f"chat-{next(self._ids)}"
        prompt = engine.frontend.inputs.render_chat(messages)
        with DeferredInterrupt(PATIENCE) as interrupt:
            engine.add_request(request_id, prompt, self._params, output_kind=OutputKind.DELTA)
            try:
                while engine.has_unfinished_requests():
                    for output in self._step():
                        if output.error is not None:
                            raise output.error
                        for completion in output.outputs:
                            yield Piece(completion.text, completion.finish_reason, completion.stop_reason)
                    interrupt.check()
            finally:
                engine.abort_request(request_id)

    def _step(self) -> list[RequestOutput]:
        try:
            return self._engine.step()
        except KeyboardInterrupt:
            # The step was torn apart: this engine cannot be trusted with another one.
            raise SystemExit(INTERRUPTED) from None

    def close(self) -> None:
        self._engine.shutdown()
