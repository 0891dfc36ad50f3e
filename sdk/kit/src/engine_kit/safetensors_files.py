"""Files of tensors in the safetensors format, for bodies of checkpoint drivers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from safetensors import SafetensorError, safe_open

from engine.types.errors import CheckpointError


def read_safetensors(files: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (name, host tensor in the file's dtype) from mapped files; one file is open at a time.

    A tensor is a view of the mapping: copy it, or the mapping stays.

    Raises:
        CheckpointError: a file is missing, truncated or broken; it names the file.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping: it cannot be iterated itself)
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"read tensors from {file}",
                f"the file is missing, truncated or broken: {error}",
                "fetch it again, and compare its size with the source's",
            ) from error
