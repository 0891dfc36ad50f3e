"""Arrays over the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from engine.process import wire


class Message(msgspec.Struct):
    """One array."""

    array: np.ndarray


def there_and_back(array: np.ndarray) -> np.ndarray:
    return wire.decoder(Message).decode(wire.encode(Message(array))).array


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint64", "float16", "float32", "float64"])
def test_numbers(dtype: str) -> None:
    array = (np.arange(12).reshape(3, 4)[:, ::2] % 2).astype(dtype)
    found = there_and_back(array)
    assert found.dtype == array.dtype and np.array_equal(found, array)


def test_numbers_that_numpy_does_not_have() -> None:
    sent = torch.randn(3, 5).to(torch.bfloat16)
    found = there_and_back(sent.view(torch.uint16).numpy().view(wire.BFLOAT16))
    assert found.dtype.metadata == wire.BFLOAT16.metadata
    assert torch.equal(torch.from_numpy(found.copy()).view(torch.bfloat16), sent)
    assert there_and_back(np.ones(2, np.uint16)).dtype.metadata is None


def test_what_is_no_number_stays() -> None:
    with pytest.raises(msgspec.ValidationError, match="dtype 'complex64' does not travel"):
        there_and_back(np.zeros(2, np.complex64))
