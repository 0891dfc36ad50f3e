"""From what a user asks to what the engine core takes: validated, tokenised, with every default filled in."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from engine.frontend.chat_template import ChatTemplate
from engine.frontend.prompts import (
    ALL_THAT_FITS,
    ParsedPrompt,
    TokensPrompt,
    cut_pair,
    cut_to_first,
    cut_to_last,
    parse_prompt,
)
from engine.frontend.request_checks import ConstraintCheck, ProcessorArguments
from engine.frontend.request_state import RequestState
from engine.interfaces.logits_processor import LogitsProcessorCard
from engine.interfaces.tokenizer import Tokenizer
from engine.types.checks import MAX_INT, check_integer, check_number
from engine.types.errors import InvalidRequestError, PromptTooLongError, shown
from engine.types.hooks import HTTPOrigin, RequestInfo
from engine.types.model import ModelDescription
from engine.types.params import MAX_SEED, SamplingParams
from engine.types.pooling import PoolingParams
from engine.types.request import EngineRequest

if TYPE_CHECKING:
    from engine.plugin import HookRelay


MAX_TIMEOUT = 1e9
"""Seconds."""


class SteadyClock:
    """Reads as `time.time()` did when it was made, and from then on counts with `time.monotonic()`.

    Requests are put in order by when they arrived, and durations are told from it: a system clock that is set, by hours
    or to the past, must change neither.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch; never less than before."""
        return self._offset + time.monotonic()

    def monotonic(self, when: float) -> float:
        """A time that `now` tells, by the monotonic clock; no later than the present."""
        return min(when - self._offset, time.monotonic())


class InputProcessor:
    """Makes engine requests. Safe to call from several threads.

    Args:
        tokenizer: at work.
        model: its vocabulary and its end-of-sequence ids; the tokenizer's own are added to them.
        max_model_len: most tokens of one request, prompt and output.
        seed: of the generator that gives a seed to every request that brings none. The same requests in the same
            order get the same seeds.
        hooks: the frontend's.
        orders_by_priority: whether requests may name a priority.
        processors: the cards of the logits processors at work.
        constraints: refuses structured outputs that no grammar driver can enforce; None: all are refused.
        chat: the chat template at work; None: the model's, as it is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ModelDescription,
        max_model_len: int,
        seed: int = 0,
        hooks: HookRelay | None = None,
        processors: Sequence[type[LogitsProcessorCard]] = (),
        *,
        orders_by_priority: bool = False,
        constraints: ConstraintCheck | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.model = model
        self.chat = ChatTemplate(tokenizer) if chat is None else chat
        self.clock = SteadyClock()
        self.vocab_size = model.vocab_size
        eos = dict.fromkeys((*model.eos_token_ids, *tokenizer.eos_token_ids))
        # An id that the model cannot draw ends nothing, and is no index into its logits.
        self.eos_token_ids = [token for token in eos if 0 <= token < model.vocab_size]
        self._seeds = random.Random(seed)
        self._orders_by_priority = orders_by_priority
        self._hooks = hooks
        self._constraints = constraints or ConstraintCheck(())
        self._processors = ProcessorArguments(processors, tokenizer, model.vocab_size)

    def process(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        timeout: float | None = None,
        origin: HTTPOrigin | None = None,
    ) -> RequestState:
        """Validate and tokenise one prompt, and cut it into n (or `best_of`) engine requests; one where it is to pool.

        The same as `admit` and then `complete`.

        Args:
            request_id: not empty; the parts, where there are several, are called "<request_id>#<index>".
            prompt: a `Prompt`.
            params: left unchanged.
            arrival_time: seconds of `time.time()`; None means now.
            priority: lower values are more urgent; other than 0 only where the scheduling policy heeds it.
            timeout: seconds until it ends with a RequestTimeoutError, from its arrival in the core; None for no limit.
            origin: what HTTP knows of it, for hooks.

        Raises:
            InvalidRequestError: a parameter or the prompt makes no sense, or a token id is outside the vocabulary; or
                the engine generates and is asked to pool, or the other way round.
            PromptTooLongError: the prompt leaves no room for one token within `max_model_len`.
            RequestRefusedError, HookFailedError: a hook plugin refused it, or failed.
        """
        info = self.admit(request_id, params, priority, timeout, origin)
        return self.complete(request_id, prompt, params, arrival_time, priority, timeout, info)

    def admit(
        self,
        request_id: str,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        timeout: float | None = None,
        origin: HTTPOrigin | None = None,
    ) -> RequestInfo | None:
        """What can be said before anything is tokenised: whether the parameters make sense, and whether hooks let the
        request in. Arguments and errors are those of `process`.

        Returns:
            What hooks are told of the request; None where none looks at single requests.
        """
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id={shown(request_id)}", "it is not a string with content")
        if isinstance(params, PoolingParams):
            check_pooling(params, self.model)
        elif not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise InvalidRequestError("generate", f"the sampling params are a {kind}", "pass SamplingParams(...)")
        elif not self.model.generates:
            raise InvalidRequestError(
                f"generate with {self.model.architecture}",
                "this engine was started to pool: it gives vectors or labels, no text",
                f"ask for {' or '.join(self.model.pooler.tasks)}, or start it with a model that generates",
            )
        else:
            params.verify()
        self._check_priority(priority)
        if timeout is not None:
            check_number("timeout", timeout, 0.0, MAX_TIMEOUT, open_low=True)
        if not self.told_of_requests:
            return None
        assert self._hooks is not None
        info = RequestInfo(request_id=request_id, params=params, priority=priority, http=origin)
        if self._hooks.admit:
            self._hooks.admit(request=info)
        return info

    @property
    def told_of_requests(self) -> bool:
        """Whether any hook looks at single requests."""
        hooks = self._hooks
        return hooks is not None and bool(
            hooks.admit or hooks.rewrite_prompt or hooks.output_filter or hooks.request_finished
        )

    def complete(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        timeout: float | None = None,
        info: RequestInfo | None = None,
    ) -> RequestState:
        """Tokenise a request that `admit` has let in, whose answer is `info`. Otherwise as `process`."""
        arrival_time = self.clock.now() if arrival_time is None else arrival_time
        pooling = check_pooling(params, self.model) if isinstance(params, PoolingParams) else None
        parsed = self._rewritten(parse_prompt(prompt), info)
        host_tokens = False
        if isinstance(params, PoolingParams):
            if self.model.pooler.lower_case and parsed.token_ids is None and parsed.text is not None:
                parsed = parsed._replace(text=parsed.text.lower())
            ids = self._ids_to_pool(parsed)
            params = SamplingParams(max_tokens=None, seed=0, detokenize=False)
            filled_in = [params]
        else:
            ids = cut_to_last(self._ids(parsed), parsed.truncate, max(1, self.max_model_len - (params.max_tokens or 1)))
            room = self._room(ids)
            self._check_ids(ids, parsed)
            complete = self._complete_params(params)
            host_tokens = self._processors.need_host_tokens(complete)
            seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
            filled_in = [
                self._filled_in(complete, room, (seed + index) & MAX_SEED, index)
                for index in range(params.num_sequences)
            ]
        count = len(filled_in)
        requests = [
            EngineRequest(
                request_id=request_id if count == 1 else f"{request_id}#{index}",
                prompt_token_ids=ids,
                params=one,
                eos_token_ids=self.eos_token_ids if pooling is None else [],
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=parsed.cache_salt,
                parent=None if count == 1 else request_id,
                host_tokens=host_tokens,
                timeout=timeout,
                pooling=pooling,
            )
            for index, one in enumerate(filled_in)
        ]
        # Of a prompt that was cut its tokens say what is left, not its text.
        text = parsed.text if parsed.truncate is None else None
        return RequestState(request_id, text, ids, params, requests, info, self.clock.monotonic(arrival_time))

    def _complete_params(self, params: SamplingParams) -> SamplingParams:
        """With the ids of bad words. Raises InvalidRequestError for what does not go with this model, or with the
        drivers at work."""
        self._check_stop_ids(params.stop_token_ids)
        self._constraints.check(params)
        complete = self._processors.complete(params)
        end_ids = params.stop_token_ids if params.ignore_eos else [*params.stop_token_ids, *self.eos_token_ids]
        self._processors.check_something_is_left(complete, end_ids)
        return complete

    def _ids_to_pool(self, parsed: ParsedPrompt) -> list[int]:
        ids = self._ids(parsed)
        text = parsed.text if parsed.token_ids is None and parsed.add_special_tokens else None
        bare = None if text is None else partial(self._encode, text, False)
        ids = cut_to_first(ids, parsed.truncate, self.max_model_len, bare)
        if len(ids) > self.max_model_len:
            raise PromptTooLongError(
                f"a prompt of {len(ids)} tokens",
                f"the longest has {self.max_model_len} tokens",
                "shorten the prompt, or raise max_model_len where the model has the positions",
            )
        self._check_ids(ids, parsed)
        return ids

    def _rewritten(self, parsed: ParsedPrompt, info: RequestInfo | None) -> ParsedPrompt:
        """The prompt as hooks want it. Token ids are passed by."""
        rewrite = None if self._hooks is None else self._hooks.rewrite_prompt
        if rewrite is None or parsed.token_ids is not None:
            return parsed
        return parsed._replace(text=rewrite(prompt=parsed.text, request=info))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids that a prompt of this text has, where no hook rewrites it. Raises InvalidRequestError, TokenizerError
        for text that is no Unicode, and PromptTooLongError for one that is longer than any prompt."""
        self._check_characters(len(text))
        lower = self.model.pooler.lower_case and not self.model.generates
        return self._encode(text.lower() if lower else text, add_special_tokens)

    def pair(self, first: Any, second: Any, most: int | None = None) -> tuple[TokensPrompt, int | None]:
        """Two texts as one prompt, and where the tokens of the second type begin (None: nowhere). With `most` it is cut
        to so many tokens, see `cut_pair`; -1: to what the model takes.

        Raises InvalidRequestError where they are no texts, or the tokenizer knows no pairs.
        """
        for text in (first, second):
            if not isinstance(text, str):
                raise InvalidRequestError(
                    f"score a {type(text).__name__}", "a pair that is read as one prompt is two texts", "pass strings"
                )
        encode_pair = getattr(self.tokenizer, "encode_pair", None)
        if encode_pair is None:
            kind = type(self.tokenizer).__name__
            raise InvalidRequestError("score a pair of texts", f"the tokenizer {kind} knows no pairs", "use another")
        if most is None:
            self._check_characters(len(first) + len(second))
        if self.model.pooler.lower_case:
            first, second = first.lower(), second.lower()
        try:
            ids, second_start = encode_pair(first, second)
            if most is not None:
                alone = [self.tokenizer.encode(text, add_special_tokens=False) for text in (first, second)]
                most = self.max_model_len if most == ALL_THAT_FITS else most
                ids, second_start = cut_pair(ids, alone[0], alone[1], second_start, most)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequestError("tokenise a pair", f"it is no valid Unicode text: {error}") from error
        return TokensPrompt(prompt_token_ids=ids), second_start

    def announce(self, request: RequestState) -> None:
        """Fire the hook `request_received`: the requests are about to be sent."""
        if self._hooks is not None and (heard := self._hooks.request_received):
            for one in request.requests:
                heard(request=one)

    def _ids(self, parsed: ParsedPrompt) -> list[int]:
        if parsed.token_ids is None:
            assert parsed.text is not None
            if parsed.truncate is None:
                self._check_characters(len(parsed.text))
            ids = self._encode(parsed.text, parsed.add_special_tokens)
        else:
            ids = parsed.token_ids
        if not ids:
            raise InvalidRequestError("an empty prompt", "there is no token to begin with", "send at least one token")
        return ids

    def _check_characters(self, count: int) -> None:
        """Refuse before it is tokenised what has too many tokens, whichever they are."""
        longest: int | None = getattr(self.tokenizer, "longest_token", None)
        if longest is not None and count > longest * self.max_model_len:
            raise PromptTooLongError(
                f"a prompt of {count} characters",
                f"the longest request has {self.max_model_len} tokens, and no token is more than {longest} characters",
                "shorten the prompt, or raise max_model_len",
            )

    def _check_ids(self, ids: list[int], parsed: ParsedPrompt) -> None:
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            outside = next(token for token in ids if not 0 <= token < self.vocab_size)
            source = "the tokenizer gives" if parsed.token_ids is None else "the prompt holds"
            raise InvalidRequestError(
                f"a prompt of {len(ids)} tokens",
                f"{source} the id {outside}, the model's vocabulary ends at {self.vocab_size - 1}",
                "check that tokenizer and model belong together",
            )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequestError("tokenise a prompt", f"it is no valid Unicode text: {error}") from error

    def _room(self, ids: list[int]) -> int:
        room = self.max_model_len - len(ids)
        if room < 1:
            raise PromptTooLongError(
                f"a prompt of {len(ids)} tokens",
                f"the longest request has {self.max_model_len} tokens, at least one of them to be generated",
                f"shorten the prompt to {self.max_model_len - 1} tokens, or raise max_model_len",
            )
        return room

    def _check_priority(self, priority: int) -> None:
        check_integer("priority", priority, -MAX_INT, MAX_INT)
        if priority and not self._orders_by_priority:
            raise InvalidRequestError(
                f"priority={priority}",
                "the scheduling policy at work does not order by it",
                "leave it out, or start the engine with a scheduling policy that does",
            )

    def _check_stop_ids(self, stop_token_ids: list[int]) -> None:
        for token in stop_token_ids:
            if token >= self.vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids=[{token}]",
                    f"the model's vocabulary ends at {self.vocab_size - 1}",
                    "pass ids of this model's tokenizer",
                )

    def _filled_in(self, params: SamplingParams, room: int, seed: int, index: int) -> SamplingParams:
        """The parameters of one sequence: `max_tokens` that fits, nothing larger than the vocabulary. The first of
        several scores the prompt for all, and all are scored where the best are wanted."""
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        logprobs = 0 if params.logprobs is None and params.num_sequences > params.n else params.logprobs
        prompt_logprobs = None if index else params.prompt_logprobs
        return msgspec.structs.replace(
            params,
            n=1,
            best_of=None,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            top_k=0 if params.top_k >= self.vocab_size else params.top_k,
            logprobs=None if logprobs is None else min(logprobs, self.vocab_size),
            prompt_logprobs=None if prompt_logprobs is None else min(prompt_logprobs, self.vocab_size),
        )


def check_pooling(params: PoolingParams, model: ModelDescription) -> PoolingParams:
    """Verified parameters with `task` and `pooling_type` filled in.

    Raises:
        InvalidRequestError: they make no sense, or this model cannot do what they ask.
    """
    params.verify()
    pooler = model.pooler
    task = pooler.tasks[0] if params.task is None else params.task
    check_task(task, model)
    complete = msgspec.structs.replace(params, task=task)
    complete.verify()  # again: what does not go with a task that was left out
    _check_dimensions(params.dimensions, model)
    if task != "token_embed":
        complete.pooling_type = params.pooling_type or pooler.pooling_type
    return complete


def check_task(task: Any, model: ModelDescription) -> None:
    """Raise InvalidRequestError where this engine does not serve the task."""
    if model.generates:
        raise InvalidRequestError(
            f"{task} with {model.architecture}",
            "this engine was started to generate text",
            'start it with runner="pooling" (--runner pooling)',
        )
    tasks = model.pooler.tasks
    if task not in tasks:
        found = "it has a classification head" if model.pooler.num_labels else "it has no classification head"
        raise InvalidRequestError(f"{task} with {model.architecture}", found, f"ask for {' or '.join(tasks)}")


def _check_dimensions(dimensions: int | None, model: ModelDescription) -> None:
    listed = model.pooler.dimensions
    if dimensions is None:
        return
    if dimensions > model.hidden_size:
        raise InvalidRequestError(
            f"dimensions={dimensions}",
            f"this model's vectors have {model.hidden_size} elements",
            f"ask for {model.hidden_size} or fewer",
        )
    if listed and dimensions not in listed and dimensions != model.hidden_size:
        sizes = ", ".join(map(str, listed))
        raise InvalidRequestError(
            f"dimensions={dimensions}", f"this model was trained for {sizes}", "ask for one of these"
        )
