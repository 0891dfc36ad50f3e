"""What pages of a KV cache hold beside tokens, as one name: the same wherever they hold the same."""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any

import msgspec

from engine.types.errors import CheckpointError
from engine.types.start import WorkerStart

PLACES, WINDOW = 1024, 4096
"""Of a file of weights so many parts are read, of so many bytes."""


def engine_identity(start: WorkerStart) -> bytes:
    """What pages hold beside tokens, in 32 bytes: see `CoreContext.identity`. The same for every rank.

    Of the weights it reads evenly spaced parts: two checkpoints that differ between these alone are taken for one.
    Raises CheckpointError for a file that cannot be read.
    """
    found, files = sha256(), [start.files, *(draft.files for draft in start.drafts)]
    for name in sum((one.weights for one in files), ()):
        read_parts(name, found)
    drivers = [
        (choice.point, choice.kind, choice.driver, choice.distribution, choice.version, choice.options)
        for choice in sum((draft.choices for draft in start.drafts), start.choices)
        if choice.point in ("checkpoint", "model", "quantization")
    ]
    made_of = [("" if one.weights else one.name) for one in files]
    dtypes = start.dtype, start.kv_cache_dtype or start.dtype
    configs = [start.model.config, *(draft.model.config for draft in start.drafts)]
    facts = configs, made_of, dtypes, start.layout, start.parallel, drivers
    found.update(msgspec.json.encode(facts, order="sorted"))
    return found.digest()


def read_parts(name: str, found: Any) -> None:
    """Take a file's length and evenly spaced parts of it into a hash. Raises CheckpointError for one that cannot be
    read."""
    try:
        with open(name, "rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            found.update(b"%d " % size)
            for offset in (*range(0, size, max(WINDOW, size // PLACES)), max(0, size - WINDOW)):
                file.seek(offset)
                found.update(file.read(WINDOW))
    except OSError as error:
        remedy = "see that the engine may read it, and that it is whole"
        raise CheckpointError(f"identify the weights in {name}", error.strerror or str(error), remedy) from error
