"""What was found broken when plugins were last imported: by `engine plugins doctor`, and by starts of a server.

`engine plugins` imports nothing, so it can only show what somebody else has seen. One small file for each Python
environment, in the user's state folder; where it cannot be written or read, it is done without.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.config.folders import state_folder
from engine.plugin.points import HOOK_PROCESSES, HOOKS

if TYPE_CHECKING:
    from engine.frontend.launch import Launch
    from engine.plugin.candidate import Candidate
    from engine.types.start import WorkerReady

_LONGEST_NAME = 200


class Seen(NamedTuple):
    """What was wrong with a plugin.

    Attributes:
        found: what was wrong.
        remedy: what mends it.
        by: who saw it, e.g. "engine serve".
        at: when, in local time, e.g. "2026-11-21 10:30".
    """

    found: str
    remedy: str
    by: str
    at: str


class PluginRecord:
    """The record of one environment.

    Args:
        path: of its file; None: that of the running Python.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = _path() if path is None else path

    def read(self) -> dict[str, Seen]:
        """What was wrong, by plugin: see `key`."""
        try:
            assert self._path is not None
            return {name: Seen(*map(str, seen)) for name, seen in json.loads(self._path.read_text()).items()}
        except (OSError, AssertionError, ValueError, TypeError, AttributeError):
            return {}

    def write(self, broken: Mapping[str, tuple[str, str]], sound: Iterable[str], by: str) -> None:
        """Note what was found now. What is said of other plugins stays, and the file is untouched where nothing is new.

        Args:
            broken: by plugin (see `key`) what is wrong with it, and the remedy.
            sound: plugins that nothing is wrong with.
            by: who looked.
        """
        before = self.read()
        after = {name: seen for name, seen in before.items() if name not in {*sound} - {*broken}}
        for name, (found, remedy) in broken.items():
            if name not in before or before[name].found != found:
                after[name] = Seen(found, remedy, by, time.strftime("%Y-%m-%d %H:%M"))
        if after == before or self._path is None:
            return
        temporary = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(after, indent=1))
            temporary.replace(self._path)


def key(plugin: Candidate) -> str:
    """A plugin in one version of its distribution: what is said of it ends with an upgrade."""
    return _key(plugin.point, plugin.name, plugin.distribution, plugin.version, plugin.value)


def _key(point: str, name: str, distribution: str, version: str, value: str) -> str:
    return " ".join((point, name, distribution, version, value))


def _path() -> Path | None:
    try:
        name = sys.prefix.strip(os.sep).replace(os.sep, "-")[-_LONGEST_NAME:]
        return state_folder() / "plugins" / f"{name}.json"
    except RuntimeError:  # the user has no home
        return None


def record_start(plan: Launch, worker: WorkerReady, by: str) -> None:
    """Note what a start that succeeded found broken, in this process or another, and what it found sound."""
    from engine.frontend.banner import broken_plugins

    broken = {
        _key(p.point, p.driver, p.distribution, p.version, p.value): (p.found, p.remedy)
        for p in broken_plugins(plan, worker)
    }
    registry = plan.registry
    heard = (c for process in HOOK_PROCESSES for c in registry.candidates(f"{HOOKS}.{process}"))
    PluginRecord().write(broken, map(key, (*registry.imported, *heard)), by)
