"""The one codec for what crosses a process boundary: msgpack by msgspec, arrays as (dtype, shape, bytes).

Numbers of type bfloat16, which numpy does not have, are arrays of dtype `BFLOAT16`.

Nothing is ever pickled. Unknown fields are ignored by the decoder, so a field may be added without a flag day.
"""

from __future__ import annotations

from typing import IO, Any

import msgspec
import numpy as np

BFLOAT16 = np.dtype(np.uint16, metadata={"holds": "bfloat16"})
"""The bits of bfloat16 numbers: what `tensor.view(torch.uint16).numpy().view(BFLOAT16)` has."""

_DTYPES = {
    **{
        name: np.dtype(name)
        for name in (
            *("bool", "int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64"),
        )
    },
    "bfloat16": BFLOAT16,
}
"""What travels, by the name that it has on the wire."""


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = (value.dtype.metadata or {}).get("holds", value.dtype.name)
        return (name, value.shape, np.ascontiguousarray(value).data)
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"{type(value)} does not travel")


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        if dtype not in _DTYPES:
            raise ValueError(f"an array of dtype {dtype!r} does not travel")
        return np.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)
    raise NotImplementedError(f"{kind} does not travel")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_hook)


def encode(message: Any) -> bytes:
    """A msgspec struct (arrays and all) as bytes. Raises NotImplementedError for a type that does not travel."""
    return _ENCODER.encode(message)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for `kind` (a struct, or a union of tagged ones), to be made once and kept. Arrays come back read-only.

    Its `decode` raises msgspec.DecodeError for bytes that are no such message.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_hook)


def read_frame(pipe: IO[bytes]) -> bytes:
    """One message from a pipe: its length in 8 bytes, little-endian, then its bytes.

    Raises EOFError where the pipe ends too early.
    """
    size = int.from_bytes(pipe.read(8), "little")
    data = pipe.read(size)
    if len(data) != size or not size:
        raise EOFError("the pipe ended before a whole message had come")
    return data


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    """The counterpart of `read_frame`."""
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()
