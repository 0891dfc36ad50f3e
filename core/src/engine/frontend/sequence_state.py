"""One sequence on its way back: ids to text, stop strings, log probabilities; or what was pooled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.frontend.stop_scanner import StopMatch, StopScanner, StopStrings
from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import EngineError, HookFailedError
from engine.types.hooks import OutputFilter
from engine.types.outputs import CompletionOutput, CoreOutput, Logprob, TokenLogprobs
from engine.types.params import SamplingParams
from engine.types.request import FinishReason


class SequenceState:
    """What the frontend knows of one engine request.

    Args:
        request_id: the core's id.
        index: which of the n it is.
        params: the user's.
        prompt_token_ids: the text that follows may depend on how the prompt ends.
        tokenizer: at work.
        stops: the compiled stop strings; None where there are none.

    Attributes:
        output: all that came so far. Its text is put together when it is asked for, see `text`.
        failure: the error that ended it here in the frontend; None where none did.
        num_cached_tokens: prompt tokens that it found in the prefix cache itself.
        first_token, last_token: when they came, by the monotonic clock. These and all below are only kept where
            `engine.frontend.observer` follows the sequence.
        queue_time, prefill_time: as the core measured them, see `CoreOutput`.
        num_tokens: that came, those behind a stop string too; 0: the times above say nothing yet.
        retried: a try before this one got its first token, which was measured.
        told: a try before this one has ended: its end is not told again.
    """

    failure: EngineError | None = None
    num_cached_tokens = 0
    first_token = 0.0
    last_token = 0.0
    queue_time = 0.0
    prefill_time = 0.0
    num_tokens = 0
    retried = False
    told = False

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        prompt_token_ids: list[int],
        tokenizer: Tokenizer,
        stops: StopStrings | None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.output = CompletionOutput(index)
        if params.logprobs is not None or params.num_sequences > params.n:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(params.skip_special_tokens, prompt_token_ids) if params.detokenize else None
        self._scanner = None if stops is None else StopScanner(stops)
        self._texts: list[str] = []
        self._text = ""

    @property
    def finished(self) -> bool:
        """True once there is a finish reason."""
        return self.output.finish_reason is not None

    @property
    def pooled(self) -> np.ndarray | None:
        """What was pooled: nothing, where text is generated."""
        return None

    @property
    def text(self) -> str:
        """All text so far."""
        if self._texts:
            self._text += "".join(self._texts)
            self._texts.clear()
        return self._text

    def take(self, news: CoreOutput) -> tuple[str, int]:
        """Take in what the core sent.

        Returns:
            The text and the number of tokens that are new. Afterwards `finished` may be true, either because the core
            said so or because a stop string was found (then tokens after it are dropped).
        """
        ids, output = news.new_token_ids, self.output
        if news.finish_reason is None and self._scanner is None and output.logprobs is None:
            output.token_ids += ids  # as nearly always: nothing to look for, nothing to count
            if self._stream is None or not (text := self._stream.push(ids)):
                return "", len(ids)
            self._texts.append(text)
            return text, len(ids)
        # The token that ended the sequence is kept among the ids, but its text is shown only on demand.
        stopped = news.finish_reason is FinishReason.STOP and not news.completed
        silent_last = stopped and not self.params.include_stop_str_in_output
        taken, match = len(ids), None
        shown: list[str] = []
        if self._stream is not None:
            if self._scanner is None:
                text = self._stream.push(ids[:-1] if silent_last else ids)
                if text:
                    shown.append(text)
            else:
                taken, match = self._scan(ids, silent_last, shown)
        if taken < len(ids):
            ids = ids[:taken]
        output.token_ids += ids
        if output.logprobs is not None:
            self._take_logprobs(ids, (news.new_logprobs or [])[:taken])
        if match is not None:
            output.finish_reason, output.stop_reason = str(FinishReason.STOP), match.stop
        elif news.finish_reason is not None:
            match = self._finish(shown)
            if match is not None and news.finish_reason is not FinishReason.ERROR:
                output.finish_reason, output.stop_reason = str(FinishReason.STOP), match.stop
            else:
                output.finish_reason, output.stop_reason = str(news.finish_reason), news.stop_reason
        new = "".join(shown)
        if new:
            self._texts.append(new)
        return new, taken

    def _scan(self, ids: list[int], silent_last: bool, shown: list[str]) -> tuple[int, StopMatch | None]:
        """Token by token, so that the one which completes a stop string is the last."""
        assert self._stream is not None
        before = len(self.output.token_ids)
        for place, token in enumerate(ids):
            if silent_last and place == len(ids) - 1:
                break
            text = self._stream.push((token,))
            if text and (match := self._search(text, before + place + 1, shown)) is not None:
                return place + 1, match
        return len(ids), None

    def _search(self, text: str, num_tokens: int, shown: list[str]) -> StopMatch | None:
        assert self._scanner is not None
        found = self._scanner.push(text, armed=num_tokens >= self.params.min_tokens)
        if isinstance(found, str):
            shown.append(found)
            return None
        shown.append(found.text)
        if self.params.include_stop_str_in_output:
            shown.append(found.stop)
        return found

    def _finish(self, shown: list[str]) -> StopMatch | None:
        """Give out what was held back: half a character (as U+FFFD), and what began like a stop string."""
        if self._stream is None:
            return None
        rest = self._stream.flush()
        if self._scanner is None:
            shown.append(rest)
            return None
        if rest and (match := self._search(rest, len(self.output.token_ids), shown)) is not None:
            return match
        shown.append(self._scanner.flush())
        return None

    def _take_logprobs(self, ids: list[int], rows: list[TokenLogprobs]) -> None:
        output = self.output
        assert output.logprobs is not None and output.cumulative_logprob is not None
        for token, row in zip(ids, rows, strict=True):
            output.cumulative_logprob += row.chosen
            output.logprobs.append(readable(token, row, self._tokenizer))


class FilteredSequence(SequenceState):
    """Its text goes through the filters of hook plugins before anybody sees it. Where a filter fails, the sequence ends
    with the finish reason "error" and `failure`.

    Args:
        filter_: gets (new text, is it the last), gives what is shown; raises HookFailedError.
        others: see `SequenceState`.
    """

    def __init__(
        self,
        filter_: OutputFilter,
        request_id: str,
        index: int,
        params: SamplingParams,
        prompt_token_ids: list[int],
        tokenizer: Tokenizer,
        stops: StopStrings | None,
    ) -> None:
        super().__init__(request_id, index, params, prompt_token_ids, tokenizer, stops)
        self._filter = filter_

    def take(self, news: CoreOutput) -> tuple[str, int]:
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


class PooledSequence(SequenceState):
    """It draws no token: its vector comes at once, the vectors of its tokens come in pieces.

    Args:
        request_id: the core's id.
        params: the request's carrier; nothing in it counts.
        tokenizer: at work.
    """

    def __init__(self, request_id: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        super().__init__(request_id, 0, params, [], tokenizer, None)
        self._pieces: list[np.ndarray] = []

    @property
    def pooled(self) -> np.ndarray | None:
        """All that came; None where nothing did."""
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0] if self._pieces else None

    def take(self, news: CoreOutput) -> tuple[str, int]:
        if news.pooled is not None:
            self._pieces.append(news.pooled)
        if news.finish_reason is not None:
            self.output.finish_reason = str(news.finish_reason)
        return "", 0


def readable(token: int, row: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """One position: the token at it first, then the most likely ones."""
    position = {token: Logprob(row.chosen, row.rank, tokenizer.token(token))}
    for place, (other, value) in enumerate(zip(row.top_ids, row.top_values, strict=True)):
        if other != token:
            position[other] = Logprob(value, place + 1, tokenizer.token(other))
    return position


class PromptLogprobs:
    """A prompt's log probabilities, put together from the pieces in which the core sends them.

    Args:
        prompt_token_ids: the prompt.
        tokenizer: at work.
    """

    def __init__(self, prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._ids = prompt_token_ids
        self._tokenizer = tokenizer
        self._positions: list[dict[int, Logprob] | None] = [None]

    def take(self, rows: Sequence[TokenLogprobs]) -> None:
        """Those of the next tokens."""
        first = len(self._positions)
        for token, row in zip(self._ids[first : first + len(rows)], rows, strict=True):
            self._positions.append(readable(token, row, self._tokenizer))

    @property
    def complete(self) -> list[dict[int, Logprob] | None] | None:
        """All positions, the first None; None until they are all there."""
        return self._positions if len(self._positions) == len(self._ids) else None
