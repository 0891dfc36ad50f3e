"""Embeddings that prompts bring in place of tokens (entry-point group `engine_parts`): read, and checked, as vLLM has
them, but from safetensors, never from a pickle. Without torch.

A prompt `{"prompt_embeds": vectors}` has these for its first tokens, whose ids are 0 wherever ids are told; a text or
token ids beside them come behind. Vectors are what transformers' models take as `inputs_embeds`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.types.embeds import BFLOAT16, PromptEmbeds
from engine.types.errors import InvalidRequestError, PromptTooLongError, shown
from engine.types.model import ModelDescription
from engine.types.params import SamplingParams

FIELD = "prompt_embeds"
_REMEDY = "pass a tensor [n, {}] of float32, bfloat16 or float16, n from 1"
_OFF = "start the engine with --enable-prompt-embeds (enable_prompt_embeds=True)"
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": BFLOAT16,
}
"""By their names in safetensors."""
_KINDS = {np.dtype(name) for name in ("float16", "float32", "float64")}
_LARGEST = {"float16": 65504.0, "bfloat16": 255 * 2.0**120, "float32": (2.0 - 2.0**-23) * 2.0**127}
"""Numbers of the dtypes that a model may have; above them is infinity."""
_HEADER = 4096
"""The most bytes of a header that names one tensor."""


def embeds_of(given: Any, model: ModelDescription, max_model_len: int, params: object) -> PromptEmbeds:
    """What a prompt brings, checked; a copy, so that the caller may change its own.

    Args:
        given: a tensor of torch, an array, or what this function has made before.
        params: the request's.

    Raises:
        InvalidRequestError: the engine takes none, the vectors are none of this model, or the request asks for what
            they cannot give.
        PromptTooLongError: there are more than a prompt may have tokens.
    """
    if not model.prompt_embeds:
        raise InvalidRequestError("a prompt with prompt_embeds", "this engine takes tokens alone", _OFF)
    if not isinstance(params, SamplingParams):
        found = "an engine that pools takes tokens alone"
        raise InvalidRequestError("a prompt with prompt_embeds", found, "send the text, or its token ids")
    if params.prompt_logprobs is not None:
        found = "vectors in place of tokens have no log probabilities"
        raise InvalidRequestError("prompt_logprobs with prompt_embeds", found, "leave one of them out")
    if isinstance(given, PromptEmbeds):
        _check_shape(given.data.shape, model, max_model_len)
        return given
    data = _array(given, _REMEDY.format(model.hidden_size))
    _check_shape(data.shape, model, max_model_len)
    data = data.copy()
    if not _finite(data, model.dtype):
        found = f"not all of them are finite numbers in {model.dtype}, by which the engine computes"
        raise InvalidRequestError("prompt_embeds", found, _REMEDY.format(model.hidden_size))
    return _made(data)


def read_text(text: str, model: ModelDescription, max_model_len: int) -> PromptEmbeds:
    """The same of base64 of a safetensors file with one tensor, as it comes over HTTP. Raises as `embeds_of`."""
    if not model.prompt_embeds:
        raise InvalidRequestError("a prompt with prompt_embeds", "this engine takes tokens alone", _OFF)
    most = _HEADER + 8 * model.hidden_size * max_model_len
    if len(text) > 4 * (most // 3 + 1):
        _check_length(len(text) * 3 // 4 // (2 * model.hidden_size), max_model_len, f"{len(text)} characters")
        raise _broken(f"its {len(text)} characters are more than any prompt's vectors are", model)
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _broken(f"it is no base64: {error}", model) from error
    return embeds_of(read_one_tensor(content, model)[1], model, max_model_len, SamplingParams())


def read_one_tensor(content: bytes, model: ModelDescription) -> tuple[str, np.ndarray]:
    """Name and tensor of a safetensors file that holds one, read-only. Raises InvalidRequestError.

    The format: the header's length in 8 bytes, the header (JSON: the dtype, shape and place of each tensor by its
    name, and text under `__metadata__`), the numbers.
    """
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= size <= min(_HEADER, len(content) - 8):
        what = "pickle, which would run whatever is in it" if content[:1] == b"\x80" else "something else"
        what = "a file of torch.save, which is pickled" if content[:2] == b"PK" else what
        raise _broken(f"it is no safetensors file with one tensor, but {what}", model)
    try:
        header = json.loads(content[8 : 8 + size])
        metadata = header.pop("__metadata__", None)
        ((name, entry),) = header.items()
        dtype, shape, (start, end) = _DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        plain = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(f"its header is none of a file with one tensor: {error}", model) from error
    if dtype is None:
        raise _broken(f"its dtype is {shown(entry['dtype'])}", model)
    if not plain or len(shape) != 2 or start or (metadata is not None and not isinstance(metadata, dict)):
        raise _broken(f"its shape is {shown(shape)}", model)
    if end != len(content) - 8 - size or end != shape[0] * shape[1] * dtype.itemsize:
        raise _broken(f"it has {len(content) - 8 - size} bytes for a tensor {shown(shape)}", model)
    return name, np.frombuffer(content, dtype, offset=8 + size).reshape(shape)


def _finite(data: np.ndarray, dtype: str) -> bool:
    """Whether they are, once they are numbers of the model's dtype."""
    if data.dtype.metadata == BFLOAT16.metadata:
        data = (data.astype(np.uint32) << 16).view(np.float32)  # whose upper half they are
    if not np.isfinite(data).all():
        return False
    most = _LARGEST.get(dtype)
    return most is None or max(float(data.max()), -float(data.min())) <= most


def _made(data: np.ndarray) -> PromptEmbeds:
    """Vectors with the key that no others have."""
    name = "bfloat16" if data.dtype.metadata == BFLOAT16.metadata else data.dtype.name
    digest = hashlib.blake2b(f"{name} {list(data.shape)} ".encode(), digest_size=16)
    digest.update(data.data)
    return PromptEmbeds(key=digest.hexdigest(), data=data)


def _array(given: Any, remedy: str) -> np.ndarray:
    """A tensor, or an array, as an array; contiguous."""
    asked = f"prompt_embeds of {type(given).__name__}"
    if hasattr(given, "detach"):
        import torch  # whoever has a tensor has it

        given = given.detach().cpu().contiguous()
        if given.dtype == torch.bfloat16:
            return given.view(torch.uint16).numpy().view(BFLOAT16)  # type: ignore[no-any-return]
        if given.dtype not in (torch.float16, torch.float32, torch.float64):
            raise InvalidRequestError(asked, f"its numbers are {given.dtype}", remedy)
        given = given.numpy()
    if not isinstance(given, np.ndarray):
        raise InvalidRequestError(asked, "that is neither a tensor nor an array", remedy)
    if given.dtype.metadata == BFLOAT16.metadata:
        return np.ascontiguousarray(given)
    if given.dtype.newbyteorder("=") not in _KINDS:
        raise InvalidRequestError(asked, f"its numbers are {given.dtype}", remedy)
    return np.ascontiguousarray(given, given.dtype.newbyteorder("="))


def _check_shape(shape: tuple[int, ...], model: ModelDescription, max_model_len: int) -> None:
    if len(shape) != 2 or not shape[0] or shape[1] != model.hidden_size:
        found = f"the model's vectors have {model.hidden_size} elements"
        raise InvalidRequestError(f"prompt_embeds of shape {list(shape)}", found, _REMEDY.format(model.hidden_size))
    _check_length(shape[0], max_model_len, f"{shape[0]} vectors")


def _check_length(count: int, max_model_len: int, what: str) -> None:
    if count >= max_model_len:
        found = f"the longest request has {max_model_len} tokens, at least one of them to be generated"
        raise PromptTooLongError(f"prompt_embeds of {what}", found, "send fewer, or raise max_model_len")


def _broken(found: str, model: ModelDescription) -> InvalidRequestError:
    remedy = f"send base64 of a safetensors file with one tensor [n, {model.hidden_size}] of F32, BF16 or F16"
    return InvalidRequestError("read prompt_embeds", found, remedy)
