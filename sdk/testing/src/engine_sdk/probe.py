"""One card after the other, each imported in a process of its own, where what hangs, crashes or leaves harms nobody.

    python -m engine_sdk.probe SECONDS

reads lines of JSON, each a candidate as a list, and answers each with a line of JSON, see `ProbeReport`. What every
card needs is imported once; then each card is imported in a fork of this process, which is as if it had been started
for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.plugin.candidate import Candidate
from engine.plugin.discovery import Registry
from engine.plugin.hints import near_matches
from engine.plugin.loading import load_entry_point
from engine.plugin.points import HOOKS, POINTS
from engine.plugin.selection import judge
from engine.types.errors import PluginError

HEAVY = ("torch", "transformers", "jax", "tensorflow", "triton")
"""Modules that a card must not import: `engine plugins why` and the start would wait for them."""

_ASKED_OF_ONE_MODEL = ("model", "checkpoint")
"""Points whose cards are asked of the one model that they are named after, or claim: no other is of interest."""
_HOOKS_MODULE = "engine.plugin.hooks"


class Finding(NamedTuple):
    """What a probe saw.

    Attributes:
        seconds: that the import took.
        heavy: modules of `HEAVY` that it brought.
        found, remedy: what is wrong with the card; empty where nothing is.
        kind: "broken", or "unmarked" for a hook plugin that works, but for a function that is no hook.
    """

    seconds: float
    heavy: list[str]
    found: str = ""
    remedy: str = ""
    kind: str = "broken"


class ProbeReport(NamedTuple):
    """What became of a probe.

    Attributes:
        finding: None where the process ended without one.
        code: its exit code, as `subprocess` has it; None where it did not end in time.
        said: the end of what it wrote to standard error.
    """

    finding: Finding | None
    code: int | None
    said: str = ""


def probe(candidate: Candidate) -> Finding:
    """Import what the candidate names. A card is also checked against its point's interface, and asked whether it can
    serve `plain_need`; a hook plugin's functions are compared with the hooks of its process. Nothing is built."""
    started, seconds, found, remedy, kind = time.perf_counter(), None, "", "", "broken"
    try:
        if candidate.point in POINTS:
            card = Registry(found=[candidate]).card(candidate)
            seconds = time.perf_counter() - started
            if candidate.point not in _ASKED_OF_ONE_MODEL:
                judge(card, candidate, plain_need(candidate.point))
        else:
            plugin = load_entry_point(candidate)
            seconds = time.perf_counter() - started
            if candidate.point.startswith(HOOKS):
                importlib.import_module(_HOOKS_MODULE).check_hooks_of(candidate, plugin)
                kind, (found, remedy) = "unmarked", _unmarked(candidate, plugin)
    except PluginError as error:
        found, remedy = error.found, error.remedy
    if seconds is None:
        seconds = time.perf_counter() - started
    return Finding(seconds, [name for name in HEAVY if name in sys.modules], found, remedy, kind)


def _unmarked(candidate: Candidate, plugin: object) -> tuple[str, str]:
    """(what is wrong, what mends it) where a function of a hook plugin looks like a hook that it does not implement, by
    its name and its arguments, and is never called, for it is not marked; empty texts where none does."""
    import pluggy

    from engine.plugin.hookspecs import HOOKSPECS

    manager, spec = pluggy.PluginManager("engine"), HOOKSPECS[candidate.point.partition(".")[2]]
    functions = {name: function for name in dir(plugin) if inspect.isroutine(function := getattr(plugin, name, None))}
    marked = {name for name in functions if manager.parse_hookimpl_opts(plugin, name) is not None}
    missing = [name for name in (n for n in vars(spec) if not n.startswith("_")) if name not in marked]
    for name, function in functions.items():
        foreign = inspect.ismodule(plugin) and getattr(function, "__module__", "") != plugin.__name__
        if name in marked or name.startswith("_") or foreign:
            continue
        taken = _arguments(function)
        for hook in [name] if name in missing else near_matches(name, missing, limit=1):
            if taken <= _arguments(getattr(spec, hook)) and (taken or hook == name):
                found = f"its function {name} looks like the hook {hook} and is not marked, so it is never called"
                remedy = "put @hookimpl (from engine.plugin) above it" + ("" if hook == name else f", call it {hook}")
                return f"{found} ({candidate.value})", f"{remedy}, or give it another name"
    return "", ""


def _arguments(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters) - {"self", "cls"}
    except (TypeError, ValueError):  # one of C says nothing of its arguments
        return {""}


def plain_need(point: str) -> object:
    """A need of this point, as a start might have it on a processor; None where the point's need is that.

    The interface of `XCard` has it as `XNeed`. Fields without a default get 1, "cpu", "float32", the first kind, or "".
    """
    module, _, card = POINTS[point].interface.partition(":")
    need = getattr(importlib.import_module(module), card.removesuffix("Card") + "Need", None)
    if need is None:
        return None
    plain = {"device": "cpu", "kind": next(iter(POINTS[point].kinds), "")}
    required = (f for f in dataclasses.fields(need) if f.default is f.default_factory is dataclasses.MISSING)
    return need(
        **{
            f.name: 1 if f.type == "int" else plain.get(f.name, "float32" if "dtype" in f.name else "")
            for f in required
        }
    )


def apart(candidate: Candidate, seconds: float) -> ProbeReport:
    """Probe in a fork of this process, which is killed after so many seconds."""
    if candidate.point in POINTS:  # what every card of the point needs is not counted as this card's
        importlib.import_module(POINTS[candidate.point].interface.partition(":")[0])
    elif candidate.point.startswith(HOOKS):
        importlib.import_module(_HOOKS_MODULE)
    with tempfile.TemporaryFile() as errors:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _probe_and_leave(candidate, writer, errors.fileno())
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            code = _ended(child, answer.fileno(), seconds)
            content = answer.read() if code == 0 else b""
        errors.seek(0, os.SEEK_END)
        errors.seek(max(0, errors.tell() - 10_000))
        said = errors.read().decode(errors="replace")
    return ProbeReport(Finding(*json.loads(content)) if content else None, code, said)


def _probe_and_leave(candidate: Candidate, writer: int, errors: int) -> None:
    """In the fork. What the import writes to standard output is nobody's business, and there is no input."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, nothing), (1, nothing), (2, errors)):
        os.dup2(source, target)
    code = 1
    try:
        os.write(writer, json.dumps(probe(candidate)).encode())
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    os._exit(code)


def _ended(child: int, answer: int, seconds: float) -> int | None:
    """The exit code of a child; None where it had to be killed. The pipe is closed, or readable, when it ends."""
    deadline = time.monotonic() + seconds
    select.select([answer], [], [], seconds)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.001)


def main() -> None:
    """Answer standard input."""
    seconds = float(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(apart(Candidate(*json.loads(line)), seconds)), flush=True)


if __name__ == "__main__":
    main()
