"""Which FlashAttention is installed: read from metadata and files alone, nothing of it is imported."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from engine_kit.host_gpus import capabilities

DISTRIBUTIONS = {"fa2": "flash-attn", "fa3": "flash-attn-3", "fa4": "flash-attn-4", "torch": "torch"}
"""Of each implementation. The registry's flash-attn-3 0.0.0 is empty: what counts is its major version."""
MAJORS = {"fa2": 2, "fa3": 3, "fa4": 4}
VARLEN = Path("nn", "attention", "varlen.py")
"""In torch's folder: where `varlen_attn` is defined, with whatever arguments this version has."""


class Facts(NamedTuple):
    """What this machine has.

    Args:
        capabilities: compute capability of each GPU; empty for none. The highest counts: CUDA takes the fastest first.
        versions: of each implementation, by its name; those that are not there are left out.
        rocm: torch is built for AMD's GPUs.
        triton: it is installed.
    """

    capabilities: tuple[tuple[int, int], ...]
    versions: dict[str, str]
    rocm: bool = False
    triton: bool = True


@lru_cache(maxsize=1)
def facts() -> Facts:
    """The facts of this machine; found out once."""
    found = {name: _version(distribution) for name, distribution in DISTRIBUTIONS.items()}
    versions = {name: version for name, version in found.items() if version is not None}
    for name, major in MAJORS.items():
        if name in versions and versions[name].split(".")[0] != str(major):
            del versions[name]
    torch = versions.get("torch", "")
    if "torch" in versions and not _takes_pages():
        del versions["torch"]
    return Facts(capabilities(), versions, "+rocm" in torch, importlib.util.find_spec("triton") is not None)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _takes_pages() -> bool:
    """Whether torch's `varlen_attn` takes a block table. Which versions do was not always the same: the text tells."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / VARLEN).read_text(encoding="utf-8")
    except OSError:
        return False
    return "block_table: torch.Tensor" in text and "seqused_k: torch.Tensor" in text
