"""Prompts of encoder-decoder models (entry-point group `engine_parts`): what the encoder reads, and what the decoder
begins with.

The forms are vLLM's: `{"encoder_prompt": ..., "decoder_prompt": ...}`, each of them a prompt as decoders have it; or
one plain prompt, which is the encoder's. Where the decoder's is left out or None it is the model's own beginning, and
any other gets the model's first id in front where it lacks it. For an encoder that reads features, `encoder_prompt` is
an array of them. Settings of a request's pages (`cache_salt`, `kv_transfer`, `kv_retention`) stand beside the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from engine.embedding import parse_prompt
from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import InvalidRequestError, PromptTooLongError, shown
from engine.types.model import EncoderForm, ModelDescription
from engine.types.request import EncoderInput
from engine_kit.truncation import cut_to_first

Parsed = Any
"""What `parse_prompt` gives."""
ENCODER, DECODER = "encoder_prompt", "decoder_prompt"
_KEPT = ("cache_salt", "kv_transfer", "kv_retention")
_FORMS = f'pass a plain prompt for the encoder, or {{"{ENCODER}": ..., "{DECODER}": ...}}'


def split(
    prompt: Any,
    model: ModelDescription,
    tokenizer: Tokenizer,
    rewrite: Callable[[Parsed], Parsed] = lambda parsed: parsed,
) -> tuple[dict[str, Any], EncoderInput]:
    """The decoder's prompt, as decoders have it, and the encoder's input.

    Args:
        rewrite: what hooks make of the encoder's text.

    Raises InvalidRequestError and PromptTooLongError.
    """
    form = model.encoder
    assert form is not None
    parts = [prompt, *(prompt.get(part) for part in (ENCODER, DECODER))] if isinstance(prompt, Mapping) else []
    if any(isinstance(part, Mapping) and "prompt_embeds" in part for part in parts):
        found = f"{model.architecture} has an encoder, and takes tokens or features"
        raise InvalidRequestError("a prompt with prompt_embeds", found, _FORMS)
    given, wanted, beside = prompt, None, {}
    if isinstance(prompt, Mapping):
        beside = {key: prompt[key] for key in _KEPT if key in prompt}
        if ENCODER in prompt:
            given, wanted = prompt[ENCODER], prompt.get(DECODER)
            _check_settings(ENCODER, given, _KEPT)
            if unknown := sorted(str(key) for key in prompt if key not in (ENCODER, DECODER, *_KEPT)):
                raise InvalidRequestError(f"a prompt with the key {unknown[0]!r}", "no prompt has that key", _FORMS)
        elif DECODER in prompt:
            raise InvalidRequestError(f"a prompt without {ENCODER!r}", f"it has {DECODER!r} alone", _FORMS)
    decoder = {"prompt_token_ids": _beginning(wanted, form, tokenizer), **beside}
    if isinstance(given, EncoderInput):
        return decoder, given
    if form.features:
        return decoder, _of(_features(given, form), form)
    return decoder, _of(np.array(_ids(rewrite(parse_prompt(given)), model, form, tokenizer), np.int32), form)


def _check_settings(part: str, prompt: Any, keys: Iterable[str]) -> None:
    """Refuse settings that would not be heeded in a part: the whole prompt's, or nobody's."""
    for key in keys if isinstance(prompt, Mapping) else ():
        if prompt.get(key) is not None and prompt[key] is not False:
            remedy = f"put it beside {part!r}" if key in _KEPT else _FORMS
            raise InvalidRequestError(f"{part} with {key}={shown(prompt[key])}", "it has no such key", remedy)


def _of(data: np.ndarray, form: EncoderForm) -> EncoderInput:
    key = hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
    return EncoderInput(key=key, num_tokens=len(data) // form.stride, data=data)


def _features(given: Any, form: EncoderForm) -> np.ndarray:
    what, steps = f"an {ENCODER} of {type(given).__name__}", form.max_tokens * form.stride
    remedy = f"pass float32 features [n, {form.features}], n a multiple of {form.stride} up to {steps}"
    if isinstance(given, (str, Mapping)):
        raise InvalidRequestError(what, "the model's encoder reads features, no text", remedy)
    try:
        data = np.asarray(given, dtype=np.float32).copy()  # the caller may fill its array again meanwhile
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidRequestError(what, f"that is no array of numbers: {error}", remedy) from error
    if data.ndim != 2 or data.shape[1] != form.features or not 0 < len(data) <= steps or len(data) % form.stride:
        raise InvalidRequestError(f"an {ENCODER} of shape {list(data.shape)}", "the model reads no such", remedy)
    if not np.isfinite(data).all():
        raise InvalidRequestError(what, "not all of it are finite numbers", remedy)
    return data


def _ids(parsed: Parsed, model: ModelDescription, form: EncoderForm, tokenizer: Tokenizer) -> list[int]:
    text: str | None = parsed.text
    ids: list[int] | None = parsed.token_ids
    most, bare = form.max_tokens if parsed.truncate == -1 else parsed.truncate, None
    if ids is None:
        assert text is not None
        longest = getattr(tokenizer, "longest_token", None)
        if most is None and longest is not None and len(text) > longest * form.max_tokens:
            raise _too_long(f"{len(text)} characters", form)
        ids = _tokenised(tokenizer, text, parsed.add_special_tokens)
        bare = partial(_tokenised, tokenizer, text, False) if parsed.add_special_tokens else None
    ids = ids if most is None else cut_to_first(ids, most, bare)
    if len(ids) > form.max_tokens:
        raise _too_long(f"{len(ids)} tokens", form)
    _check(ids, model)
    return ids


def _too_long(what: str, form: EncoderForm) -> PromptTooLongError:
    found = f"its encoder reads {form.max_tokens} tokens at most"
    return PromptTooLongError(
        f"a prompt of {what} for the encoder", found, "shorten it, or send truncate_prompt_tokens"
    )


def _check(ids: list[int], model: ModelDescription) -> None:
    if not ids:
        raise InvalidRequestError("an empty prompt", "the encoder has no token to read", "send at least one token")
    if outside := next((token for token in ids if not 0 <= token < model.vocab_size), None):
        found = f"it holds the id {outside}, the model's vocabulary ends at {model.vocab_size - 1}"
        raise InvalidRequestError(f"a prompt of {len(ids)} tokens", found, "check that tokenizer and model match")


def _beginning(wanted: Any, form: EncoderForm, tokenizer: Tokenizer) -> list[int]:
    """The decoder's first tokens."""
    if wanted is None:
        return list(form.decoder_prompt)
    _check_settings(DECODER, wanted, (*_KEPT, "truncate_prompt_tokens", "add_special_tokens"))
    parsed = parse_prompt(wanted)
    ids = parsed.token_ids
    if ids is None:
        assert parsed.text is not None
        ids = _tokenised(tokenizer, parsed.text, False)
    first = form.decoder_prompt[:1]
    # Whisper's prompt may begin with text that was before, and has its first id behind that.
    there = ids if form.features else ids[:1]
    return ids if set(first) <= set(there) else [*first, *ids]


def _tokenised(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    try:
        return tokenizer.encode(text, special)
    except (UnicodeError, TypeError) as error:
        raise InvalidRequestError("tokenise a prompt", f"it is no valid Unicode text: {error}") from error
