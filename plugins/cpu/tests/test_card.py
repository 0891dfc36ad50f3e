"""What the cards say, with and without the native module."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

card = pytest.importorskip("engine_cpu.communicator_shm.card", reason="engine-cpu is not installed")

from engine.interfaces.communicator import CommunicatorNeed  # noqa: E402

NEED = CommunicatorNeed(world_size=2, device="cpu")


def test_reasons(native) -> None:
    assert card.ShmCommunicator.unsupported(NEED) == []
    need = CommunicatorNeed(world_size=1, device="cuda:0")
    reasons = card.ShmCommunicator.unsupported(need)
    for word, reason in zip(("nobody", "cuda:0"), reasons, strict=True):
        assert word in reason
    assert card.ShmCommunicator.unsupported(CommunicatorNeed(world_size=65, device="cpu")) == [
        "65 ranks are more than 64"
    ]


@pytest.mark.parametrize(("note", "reason"), [("no C++ compiler was found", "no C++ compiler"), (None, "no build")])
def test_without_the_native_module(monkeypatch, tmp_path: Path, note: str | None, reason: str) -> None:
    """As after an installation on a machine without a compiler: the note of the build is the reason."""
    if note:
        (tmp_path / "native_note.txt").write_text(note)
    specs = {"engine_cpu._native": None, "engine_cpu": SimpleNamespace(submodule_search_locations=[str(tmp_path)])}
    monkeypatch.setattr(importlib.util, "find_spec", specs.__getitem__)
    (found,) = card.ShmCommunicator.unsupported(NEED)
    assert found.startswith("engine_cpu's native module is not built: ") and reason in found
