"""From what a user asks to what the engine core takes: the forms of a prompt; validated, tokenised, with every default
filled in."""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

import msgspec

from engine.frontend.request_state import RequestState
from engine.interfaces.logits_processor import LogitsProcessorCard
from engine.interfaces.tokenizer import Tokenizer
from engine.plugin.loading import brought
from engine.types.checks import MAX_INT, check_integer, check_number, invalid
from engine.types.errors import InvalidRequestError, PromptTooLongError, shown
from engine.types.hooks import HTTPOrigin, RequestInfo
from engine.types.model import ModelDescription
from engine.types.params import MAX_SEED, SamplingParams
from engine.types.pooling import PoolingParams
from engine.types.request import Adapter, EngineRequest
from engine.types.retention import KVRetention

if TYPE_CHECKING:
    from engine.plugin import HookRelay

MAX_TIMEOUT = 1e9
"""Seconds."""
ALL_THAT_FITS = -1
_CUT = "truncate_prompt_tokens"
_FORMS = 'pass a string, a list of token ids, {"prompt": "..."} or {"prompt_token_ids": [...]}'


class _Beside(TypedDict, total=False):
    add_special_tokens: bool
    cache_salt: str
    truncate_prompt_tokens: int
    kv_transfer: dict[str, Any]
    kv_retention: dict[str, Any] | Sequence[dict[str, Any]]
    adapter: Adapter


class TextPrompt(_Beside):
    """Text to tokenise. Prompts with different `cache_salt` share no cached pages. Unless `add_special_tokens` is
    False, the tokenizer adds those that it adds to every text, such as one that begins it. Of a prompt with
    `truncate_prompt_tokens` the last so many tokens are taken, the first where it is pooled; -1: as many as fit.
    `kv_transfer` tells KV connectors which engine computed it, or is to go on from here: `RequestOutput.kv_transfer` of
    the one is for the other. `kv_retention` says what becomes of its KV cache, see `KVRetention`; `adapter` by which
    `engine.types.request.Adapter` it is computed."""

    prompt: str


class TokensPrompt(_Beside):
    """Token ids, taken as they are. `prompt` is their text, to be shown with the output; it is not tokenised."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


class EmbedsPrompt(_Beside):
    """Embeddings before a text or token ids, if there are any: see `engine_kit.prompt_embeds`."""

    prompt_embeds: Any
    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[Sequence[int]]


Prompt = str | TextPrompt | TokensPrompt | EmbedsPrompt | Sequence[int]
"""One prompt: text, a dict with text, a dict with token ids, one with embeddings, or bare token ids."""
_KEYS = frozenset[str]().union(*(form.__annotations__ for form in (TextPrompt, TokensPrompt, EmbedsPrompt)))


class ParsedPrompt(NamedTuple):
    """A prompt taken apart. At least one of `text` and `token_ids` is there; the ids win.

    Args:
        text: to tokenise, or to show with the output.
        token_ids: plain Python integers, not yet compared with the vocabulary.
        cache_salt, add_special_tokens, truncate, kv_transfer, kv_retention, adapter: see `TextPrompt`. embeds: given.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None
    add_special_tokens: bool = True
    truncate: int | None = None
    kv_transfer: dict[str, Any] | None = None
    kv_retention: tuple[KVRetention, ...] = ()
    adapter: Adapter | None = None
    embeds: Any = None


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
        chat_template: in place of the model's; None: it is the model's own.
        chat_variables: of the template, where a request does not set them.
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
        constraints: Any = None,
        chat_template: str | None = None,
        chat_variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.model = model
        self.clock = SteadyClock()
        self.vocab_size = model.vocab_size
        eos = dict.fromkeys((*model.eos_token_ids, *tokenizer.eos_token_ids))
        # An id that the model cannot draw ends nothing, and is no index into its logits.
        self.eos_token_ids = [token for token in eos if 0 <= token < model.vocab_size]
        self.of_adapters: Callable[[Adapter], Tokenizer] | None = None
        self._chat_template = chat_template
        self._chat_variables = chat_variables or {}
        self._seeds = random.Random(seed)
        self._orders_by_priority = orders_by_priority
        self._hooks = hooks
        checks = brought("request_checks", "take requests")
        self._constraints = constraints or checks.ConstraintCheck(())
        self._processors = checks.ProcessorArguments(processors, model.vocab_size)
        self._check_pooling = checks.check_pooling

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

        Returns what hooks are told of the request; None where none looks at single requests.
        """
        if not isinstance(request_id, str) or not request_id:
            raise invalid("request_id", request_id, "it is not a string with content")
        if isinstance(params, PoolingParams):
            self._check_pooling(params, self.model)
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
        check_integer("priority", priority, -MAX_INT, MAX_INT)
        if priority and not self._orders_by_priority:
            remedy = "leave it out, or start the engine with a scheduling policy that does"
            raise invalid("priority", priority, "the scheduling policy at work does not order by it", remedy)
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
        encoder = None
        if self.model.encoder is not None:
            rewrite, serve = partial(self._rewritten, info=info), "serve an encoder-decoder model"
            prompt, encoder = brought("encoder_prompts", serve)(prompt, self.model, self.tokenizer, rewrite)
        parsed = self._rewritten(parse_prompt(prompt), info)
        pooling: PoolingParams | None = None
        ends, tokenizer = self.eos_token_ids, self.tokenizer_of(parsed.adapter)
        if tokenizer is not self.tokenizer:
            ends = list(dict.fromkeys((*ends, *(end for end in tokenizer.eos_token_ids if 0 <= end < self.vocab_size))))
        embeds = parsed.embeds
        if embeds is not None:
            embeds = brought("prompt_embeds", "take prompt_embeds")(embeds, self.model, self.max_model_len, params)
        host_tokens = False
        if isinstance(params, PoolingParams):
            pooler = self.model.pooler
            task = params.task or pooler.tasks[0]
            kind = None if task in ("token_embed", "token_classify") else params.pooling_type or pooler.pooling_type
            pooling = msgspec.structs.replace(params, task=task, pooling_type=kind)
            if pooler.lower_case and parsed.token_ids is None and parsed.text is not None:
                parsed = parsed._replace(text=parsed.text.lower())
            ids = self._ids_to_pool(parsed)
            params = SamplingParams(max_tokens=None, seed=0, detokenize=False)
            filled_in = [params]
        else:
            ids = [0] * (0 if embeds is None else len(embeds.data))
            fits = self.max_model_len - len(ids) - (params.max_tokens or 1)
            ids += cut_to_last(self._ids(parsed), parsed.truncate, max(1, fits))
            room = self._room(ids)
            self._check_ids(ids, parsed)
            complete = self._complete_params(params, tokenizer, ends)
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
                eos_token_ids=ends if pooling is None else [],
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=parsed.cache_salt,
                parent=None if count == 1 else request_id,
                host_tokens=host_tokens,
                timeout=timeout,
                pooling=pooling,
                kv_transfer=None if index else parsed.kv_transfer,  # the others of n wait for it, and find its pages
                kv_retention=parsed.kv_retention,
                encoder=encoder,
                adapter=parsed.adapter,
                embeds=embeds,
            )
            for index, one in enumerate(filled_in)
        ]
        # Of a prompt that was cut its tokens say what is left, not its text.
        text = None if parsed.text is None or parsed.truncate is not None else str(parsed.text)  # of a class of its own
        arrived = self.clock.monotonic(arrival_time)
        return RequestState(request_id, text, ids, params, requests, info, arrived, tokenizer=tokenizer)

    def _complete_params(self, params: SamplingParams, tokenizer: Tokenizer, ends: Sequence[int]) -> SamplingParams:
        """With the ids of bad words. Raises InvalidRequestError for what does not go with this model, or with the
        drivers at work."""
        if (highest := max(params.stop_token_ids, default=0)) >= self.vocab_size:
            found = f"the model's vocabulary ends at {self.vocab_size - 1}"
            raise InvalidRequestError(f"stop_token_ids=[{highest}]", found, "pass ids of this model's tokenizer")
        self._constraints.check(params)
        complete = self._processors.complete(params, tokenizer)
        end_ids = params.stop_token_ids if params.ignore_eos else [*params.stop_token_ids, *ends]
        self._processors.check_something_is_left(complete, end_ids)
        return complete

    def _ids_to_pool(self, parsed: ParsedPrompt) -> list[int]:
        ids = self._ids(parsed)
        most = self.max_model_len if parsed.truncate == ALL_THAT_FITS else parsed.truncate
        if most is not None and len(ids) > most:
            text = parsed.text if parsed.token_ids is None and parsed.add_special_tokens else None
            bare = None if text is None else partial(self._encode, text, False, parsed.adapter)
            ids = brought("truncation", "truncate a prompt that is pooled")(ids, most, bare)
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

    def tokenizer_of(self, adapter: Adapter | None) -> Tokenizer:
        """An adapter's own where it brings one, see `engine_kit.adapter_tokenizers`; else the model's."""
        return self.tokenizer if adapter is None or self.of_adapters is None else self.of_adapters(adapter)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        adapter: Adapter | None = None,
    ) -> TextPrompt:
        """A conversation as a prompt, see `Tokenizer.render_chat`. A request's own template and variables go first."""
        tokenizer = self.tokenizer_of(adapter)
        text = tokenizer.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template=self._chat_template if template is None and tokenizer is self.tokenizer else template,
            variables={**self._chat_variables, **(variables or {})},
        )
        return TextPrompt(prompt=text, add_special_tokens=False)

    def tokenize(self, text: str, add_special_tokens: bool = True, adapter: Adapter | None = None) -> list[int]:
        """The ids that a prompt of this text has, where no hook rewrites it. Raises InvalidRequestError, TokenizerError
        for text that is no Unicode, and PromptTooLongError for one that is longer than any prompt."""
        self.check_characters(len(text))
        lower = self.model.pooler.lower_case and not self.model.generates
        return self._encode(text.lower() if lower else text, add_special_tokens, adapter)

    def _ids(self, parsed: ParsedPrompt) -> list[int]:
        if parsed.token_ids is None:
            assert parsed.text is not None
            if parsed.truncate is None:
                self.check_characters(len(parsed.text))
            ids = self._encode(parsed.text, parsed.add_special_tokens, parsed.adapter)
        else:
            ids = parsed.token_ids
        if not ids and parsed.embeds is None:
            raise InvalidRequestError("an empty prompt", "there is no token to begin with", "send at least one token")
        return ids

    def check_characters(self, count: int) -> None:
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

    def _encode(self, text: str, add_special_tokens: bool, adapter: Adapter | None) -> list[int]:
        try:
            return self.tokenizer_of(adapter).encode(text, add_special_tokens)
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

    def _filled_in(self, params: SamplingParams, room: int, seed: int, index: int) -> SamplingParams:
        """The parameters of one sequence: `max_tokens` that fits, nothing larger than the vocabulary. The first of
        several scores the prompt for all, and all are scored where the best are wanted."""
        max_tokens = room if params.max_tokens is None else max(1, min(params.max_tokens, room))
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


# -- prompts -----------------------------------------------------------------------------------------------------------
def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Take one prompt apart. Raises InvalidRequestError for anything that is no `Prompt`."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None, None)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(None, _token_ids(prompt), None)
    unknown = sorted(str(key) for key in prompt if key not in _KEYS)
    if unknown:
        raise InvalidRequestError(f"a prompt with the key {unknown[0]!r}", "no prompt has that key", _FORMS)
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    embeds = prompt.get("prompt_embeds")
    ids = [] if text is None and ids is None and embeds is not None else ids
    if text is None and ids is None:
        raise InvalidRequestError("a prompt without text", "it has neither 'prompt' nor 'prompt_token_ids'", _FORMS)
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name}={shown(value)}", "it is not a string", _FORMS)
    special = prompt.get("add_special_tokens", True)
    if not isinstance(special, bool):
        raise InvalidRequestError(f"add_special_tokens={shown(special)}", "it is not a boolean", _FORMS)
    most = prompt.get("truncate_prompt_tokens")
    check_truncation(most)
    transfer = prompt.get("kv_transfer")
    if transfer is not None and not isinstance(transfer, dict):
        raise InvalidRequestError(f"kv_transfer={shown(transfer)}", "it is not a dict", _FORMS)
    adapter = prompt.get("adapter")
    if adapter is not None and not isinstance(adapter, Adapter):
        raise InvalidRequestError(f"adapter={shown(adapter)}", "it is no adapter", "pass one as LoRARequest makes it")
    retention = _retention(prompt.get("kv_retention"))
    ids = None if ids is None else _token_ids(ids)
    return ParsedPrompt(text, ids, salt, special, most, transfer, retention, adapter, embeds)


def _retention(value: Any) -> tuple[KVRetention, ...]:
    """One, or several."""
    if value is None:
        return ()
    try:
        return msgspec.convert(value if isinstance(value, (list, tuple)) else (value,), tuple[KVRetention, ...])
    except msgspec.ValidationError as error:
        remedy = "pass {ttl: seconds to 86400, priority: 0 to 100, pin: true or false}, or {release: true}"
        raise InvalidRequestError(f"kv_retention={shown(value)}", str(error), remedy) from error


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or several as a list of prompts, each still in its own form.

    A list of integers is one prompt; a list of anything else is several.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):  # a numpy array or a tensor: one row is one prompt
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequestError(f"generate from {type(prompts).__name__}", "that is no prompt", _FORMS)
    if prompts and isinstance(prompts[0], int) and not isinstance(prompts[0], bool):
        return [prompts]
    return list(prompts)


def _token_ids(value: Any) -> list[int]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise InvalidRequestError(f"a prompt of type {type(value).__name__}", "that is no prompt", _FORMS)
    if all(type(token) is int for token in value):
        return list(value)
    ids: list[int] = []
    for token in value:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise InvalidRequestError(
                "prompt_token_ids", f"{shown(token)} is not an integer", "pass a list of integers"
            )
        ids.append(operator.index(token))
    return ids


def check_truncation(most: Any) -> None:
    """Raise InvalidRequestError for what is neither a number of tokens, nor `ALL_THAT_FITS`, nor None."""
    if most is not None and (type(most) is not int or most < -1 or most == 0):
        raise InvalidRequestError(
            f"{_CUT}={shown(most)}", "it is no number of tokens", "pass one from 1, or -1 for what fits"
        )


def cut_to_last(ids: list[int], most: int | None, fits: int) -> list[int]:
    """The last tokens of a prompt that is to be gone on from.

    Args:
        most: so many; `ALL_THAT_FITS`; None cuts nothing.
        fits: how many leave room for an answer, at least 1.
    """
    if most is None:
        return ids
    return ids[-(fits if most == ALL_THAT_FITS else most) :]
