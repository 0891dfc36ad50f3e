"""Whether the native module is there. Light: cards ask, and importing the module itself is left to bodies."""

from __future__ import annotations

import importlib.util
from pathlib import Path

MODULE = "engine_cpu._native"
TAPE = "engine_cpu.tape"
"""The recorder that sees what this package's native module computes: a word for `PlatformCard.recorder`, and for other
drivers' `captured_by`."""


def why_not_built() -> list[str]:
    """The reason why drivers of this package cannot work, for a card's `unsupported`; empty where they can."""
    if importlib.util.find_spec(MODULE) is not None:
        return []
    return [f"engine_cpu's native module is not built: {_note()} (`pip install` of plugins/cpu builds it)"]


def _note() -> str:
    """What the build wrote down."""
    spec = importlib.util.find_spec("engine_cpu")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            note = Path(folder, "native_note.txt").read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if note:
            return note
    return "no build of it was run"
