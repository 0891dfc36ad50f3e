"""A stranger's plugin as its author has it on disk: a scheduling policy and hooks, in a package of their own."""

from __future__ import annotations

from pathlib import Path

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "engine-moon"
version = "@version@"
requires-python = ">=3.11"
dependencies = ["engine-base"]

[project.entry-points."engine.scheduling_policy.v1"]
moon = "engine_moon.card:Moon"

[project.entry-points."engine.hooks.core.v0"]
moon = "engine_moon.hooks:Listener"

[tool.setuptools.packages.find]
where = ["src"]
"""

CARD = """\
from pydantic import BaseModel, ConfigDict

from engine.interfaces.scheduling_policy import SchedulingPolicyCard


class MoonOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    phase: str = "full"


class Moon(SchedulingPolicyCard):
    priority = -50
    Options = MoonOptions
    body = "engine_moon.body:MoonQueue"
"""

BODY = """\
import sys
from collections import OrderedDict


class MoonQueue:
    def __init__(self, context):
        print(f"the moon of version @version@ is {context.options.phase}", file=sys.stderr, flush=True)
        self._queue = OrderedDict()

    def push(self, request):
        self._queue[request.request_id] = request

    def push_front(self, request):
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def peek(self):
        return next(iter(self._queue.values()), None)

    def pop(self):
        if not self._queue:
            raise IndexError("nobody waits")
        return self._queue.popitem(last=False)[1]

    def remove(self, request):
        del self._queue[request.request_id]

    def victim(self, running, pages):
        return running[-1]

    def __len__(self):
        return len(self._queue)

    def __iter__(self):
        return iter(self._queue.values())
"""

HOOKS = """\
import sys

from engine.plugin import hookimpl


class Listener:
    def __init__(self):
        self._said = False

    @hookimpl
    def step_done(self, stats):
        if not self._said:
            self._said = True
            print("the moon has seen a step", file=sys.stderr, flush=True)
"""


def write(folder: Path, version: str) -> Path:
    """The package's sources in this version."""
    files = {
        "pyproject.toml": PROJECT,
        "src/engine_moon/__init__.py": "",
        "src/engine_moon/card.py": CARD,
        "src/engine_moon/body.py": BODY,
        "src/engine_moon/hooks.py": HOOKS,
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.replace("@version@", version))
    return folder
