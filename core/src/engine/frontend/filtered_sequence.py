"""A sequence whose text goes through the filters of hook plugins before anybody sees it."""

from __future__ import annotations

from engine.frontend.sequence_state import SequenceState
from engine.frontend.stop_scanner import StopStrings
from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import HookFailedError
from engine.types.hooks import OutputFilter
from engine.types.outputs import CoreOutput
from engine.types.params import SamplingParams
from engine.types.request import FinishReason


class FilteredSequence(SequenceState):
    """As `SequenceState`; where the filter fails, the sequence ends with the finish reason "error" and `failure`.

    Args:
        request_id, index, params, prompt_token_ids, tokenizer, stops: see `SequenceState`.
        filter_: gets (new text, is it the last), gives what is shown; raises HookFailedError.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        prompt_token_ids: list[int],
        tokenizer: Tokenizer,
        stops: StopStrings | None,
        filter_: OutputFilter,
    ) -> None:
        super().__init__(request_id, index, params, prompt_token_ids, tokenizer, stops)
        self._filter = filter_

    def take(self, news: CoreOutput) -> tuple[str, int]:
        """See `SequenceState.take`; the text is what the filter shows."""
        text, num_tokens = super().take(news)
        if text:
            self._texts.pop()  # what the model wrote
        if text or self.finished:
            try:
                text = self._filter(text, self.finished)
            except HookFailedError as error:
                text, self.failure = "", error
                self.output.finish_reason, self.output.stop_reason = str(FinishReason.ERROR), None
        if text:
            self._texts.append(text)
        return text, num_tokens
