"""The user's own folders."""

from __future__ import annotations

from pathlib import Path

from engine_chat.command import state_folder


def test_the_state_folder_follows_the_xdg_specification(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    default = Path("/home/somebody/.local/state/engine")
    assert state_folder({"XDG_STATE_HOME": "/state"}) == Path("/state/engine")
    assert state_folder({}) == state_folder({"XDG_STATE_HOME": "relative"}) == default
