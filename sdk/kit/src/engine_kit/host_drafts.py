"""What drafters share that find their drafts on the host, in tokens that are torch's there, or on a device, or numpy's:
see `engine.interfaces.drafter.DraftSession`."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np


def library_of(tokens: Any) -> ModuleType:
    """numpy or torch, whose array it is. torch is imported where it is there anyway."""
    return np if isinstance(tokens, np.ndarray) else importlib.import_module("torch")


def on_host(tokens: Any) -> np.ndarray | None:
    """The same memory as numpy's; None where it is a device's."""
    if isinstance(tokens, np.ndarray):
        return tokens
    found: np.ndarray | None = tokens.numpy() if tokens.device.type == "cpu" else None
    return found


def sent_beside(tokens: Any, array: np.ndarray, platform: Any) -> Any:
    """An array of the host's where the tokens are, of their library; a copy to a device is the platform's, and nobody
    waits for it."""
    if isinstance(tokens, np.ndarray):
        return array
    torch = library_of(tokens)
    host = torch.from_numpy(array)
    if tokens.device.type == "cpu":
        return host
    out = torch.empty(host.shape, dtype=host.dtype, device=tokens.device)
    platform.to_device(host, out)
    return out
