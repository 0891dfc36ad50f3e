"""Prompts of encoder-decoder models, taken apart: what is not heeded is refused, and what is kept is nobody else's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.types.errors import InvalidRequestError
from engine.types.model import EncoderForm
from engine_kit.encoder_prompts import split

IDS: dict[str, Any] = {"prompt_token_ids": [5, 6]}


def taken_apart(prompt: Any, **form: Any) -> Any:
    model: Any = SimpleNamespace(encoder=EncoderForm(max_tokens=4, decoder_prompt=(2,), **form), vocab_size=10)
    return split(prompt, model, tokenizer=SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key_and_value",
    [("cache_salt", "mine"), ("kv_transfer", {"a": 1}), ("kv_retention", {"ttl": 5})],
    ids=lambda pair: pair[0],
)
@pytest.mark.parametrize("part", ["encoder_prompt", "decoder_prompt"])
def test_settings_of_the_whole_prompt_stand_beside_its_parts(part: str, key_and_value: tuple[str, Any]) -> None:
    """Within a part nobody would read them: a salt, say, would keep no cache apart."""
    key, value = key_and_value
    parts = {"encoder_prompt": IDS, "decoder_prompt": IDS}
    decoder, _ = taken_apart({**parts, key: value})
    assert decoder == {"prompt_token_ids": [2, 5, 6], key: value}
    with pytest.raises(InvalidRequestError, match=f"{part} with {key}=.*put it beside '{part}'"):
        taken_apart({**parts, part: {**IDS, key: value}})


def test_what_no_decoder_prompt_has() -> None:
    for key, value in (("truncate_prompt_tokens", 3), ("add_special_tokens", True)):
        with pytest.raises(InvalidRequestError, match=f"decoder_prompt with {key}="):
            taken_apart({"encoder_prompt": IDS, "decoder_prompt": {**IDS, key: value}})


def test_features_are_copied() -> None:
    """A caller may fill its array again before they are encoded, and their key says what they were."""
    array = np.ones((4, 3), np.float32)
    _, given = taken_apart({"encoder_prompt": array}, features=3)
    array[:] = 7
    assert (given.data == 1).all() and given.data.dtype == np.float32


@pytest.mark.parametrize(
    "given", [[[10**400] * 3], [["x"] * 3], [[1.0], [1.0, 2.0]], torch.ones(2, 3, requires_grad=True), None], ids=str
)
def test_what_are_no_features(given: Any) -> None:
    with pytest.raises(InvalidRequestError):
        taken_apart({"encoder_prompt": given}, features=3)
