"""Which FlashAttention is installed: read from metadata and files alone, nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from engine_kit.host_gpus import capabilities
from engine_kit.libraries import version_of

DISTRIBUTIONS = {"fa2": "flash-attn", "fa4": "flash-attn-4", "torch": "torch"}
"""Of each implementation but FlashAttention 3."""
MAJORS = {"fa2": 2, "fa4": 4}
FA3_DISTRIBUTIONS = ("flash-attn-3", "tokenspeed-fa3")
"""Who is known to build module flash_attn_3._C, which is what counts: the registry's flash-attn-3 0.0.0 is empty."""
FA3_FLAGS = ("flash_attn_3/flash_attn_config.py", "flash_attn_config.py")
"""Where builds of it keep the flags that they were built with, beside or in their package."""
VARLEN = Path("nn", "attention", "varlen.py")
"""In torch's folder: where `varlen_attn` is defined, with whatever arguments this version has."""


class Facts(NamedTuple):
    """What this machine has.

    Args:
        capabilities: compute capability of each GPU; empty for none. The highest counts: CUDA takes the fastest first.
        versions: of each implementation, by its name; those that are not there are left out.
        rocm: torch is built for AMD's GPUs.
        triton: it is installed.
        fa3_without: the features that the installed FlashAttention 3 was built without, in the words of its flags:
            "SOFTCAP", "HDIM256". Empty where it does not say.
    """

    capabilities: tuple[tuple[int, int], ...]
    versions: dict[str, str]
    rocm: bool = False
    triton: bool = True
    fa3_without: frozenset[str] = frozenset()


@lru_cache(maxsize=1)
def facts() -> Facts:
    """The facts of this machine; found out once."""
    found = {name: version_of(distribution) for name, distribution in DISTRIBUTIONS.items()}
    versions = {name: version for name, version in found.items() if version}
    for name, major in MAJORS.items():
        if name in versions and versions[name].split(".")[0] != str(major):
            del versions[name]
    torch = versions.get("torch", "")
    if "torch" in versions and not _takes_pages():
        del versions["torch"]
    folder, without = _fa3_folder(), frozenset[str]()
    if folder is not None:
        named = ((name, version_of(name)) for name in FA3_DISTRIBUTIONS)
        builds = [f"{name} {version}" for name, version in named if version and version != "0.0.0"]
        versions["fa3"] = builds[0] if builds else "of an unknown version"
        without = _built_without(folder)
    return Facts(capabilities(), versions, "+rocm" in torch, importlib.util.find_spec("triton") is not None, without)


def _fa3_folder() -> Path | None:
    """Where package flash_attn_3 lies, if a compiled module is in it."""
    spec = importlib.util.find_spec("flash_attn_3")
    for folder in map(Path, () if spec is None else spec.submodule_search_locations or ()):
        if any(folder.glob("_C*.so")):
            return folder
    return None


def _built_without(folder: Path) -> frozenset[str]:
    """What CONFIG["build_flags"] of a build says, which is read as text: importing it may import the library."""
    for name in FA3_FLAGS:
        try:
            tree = ast.parse((folder.parent / name).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "CONFIG":
                try:
                    flags = ast.literal_eval(statement.value)["build_flags"]
                    return frozenset(flag.partition("_DISABLE_")[2] for flag, on in flags.items() if on) - {""}
                except (ValueError, TypeError, KeyError, AttributeError):
                    continue
    return frozenset()


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
