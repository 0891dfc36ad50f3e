"""Flags of vLLM's commands that have another name here, or need none: a copied command runs, and says in a line a flag
what became of it. What would mean something else is refused, with what to do.

The flags stand in files: `vllm_flags.toml` beside this one, which says the form, and those that plugins name as a
`pathlib.Path` in the entry-point group `engine_vllm_flags`. The program finds this module by the group `engine_parts`.
"""

from __future__ import annotations

import json
import logging
import re
import tomllib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engine.plugin.candidate import entry_points
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)

_FACTS = {"is", "needless", "only", "instead", "read"}


@cache
def other_names() -> Mapping[str, Mapping[str, Any]]:
    """What is known of each flag. A plugin's file that cannot be read is left out, with a warning; where it has a flag
    of ours, ours holds."""
    found: dict[str, dict[str, Any]] = {}
    for entry in (*entry_points("engine_vllm_flags"), None):
        try:
            path: Path = Path(__file__).with_name("vllm_flags.toml") if entry is None else entry.load()
            flags = tomllib.loads(path.read_text(encoding="utf-8"))
            if unknown := {fact for facts in flags.values() for fact in facts} - _FACTS:
                raise ValueError(f"of no flag can be said: {', '.join(sorted(unknown))}")
        except Exception:
            log.warning("flags of vLLM's that a plugin brings cannot be read", exc_info=True)
            continue
        for flag, facts in flags.items():
            found[flag] = found.get(flag, {}) | facts
    return found


def _count(text: str) -> list[str]:
    """8k is 8,000 and 8K 8,192, as there."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", text)
    if found is None:
        return [text]
    base = 1000 if found[2].islower() else 1024
    return [str(int(float(found[1]) * base ** ("kmg".index(found[2].lower()) + 1)))]


def _gibibytes(text: str) -> list[str]:
    """A plain number is one of GiB there and of bytes here, of which so few would hold nothing."""
    return [f"{text}GiB"] if re.fullmatch(r"\d{1,4}(\.\d+)?", text) and float(text) else [text]


def _list(text: str) -> list[str]:
    try:
        return [str(part) for part in json.loads(text)] if text.startswith("[") else [text]
    except ValueError:
        return [text]


READERS: Mapping[str, Callable[[str], list[str]]] = {"count": _count, "gibibytes": _gibibytes, "list": _list}
"""How values of some flags are put into those of here: it may be several, of a flag that is repeated."""


def translate(arguments: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """A command line with the flags and values of vLLM's put into those of here.

    Args:
        arguments: as typed.
        known: the command's own flags, which mean what they mean here.

    Returns:
        The command line, and a line for each flag that was put into another or left out.

    Raises ConfigError for a part of a flag that is refused, as `--speculative-config.method`.
    """
    result: list[str] = []
    notes: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            return [*result, argument, *rest], notes
        typed, equals, value = argument.partition("=")
        flag = typed if "." in typed else typed.replace("_", "-")
        facts = other_names().get(flag, {}) if argument.startswith("-") else {}
        if flag in known:
            facts = {"is": flag, "read": facts["read"]} if "read" in facts else {}
        ours = facts.get("is", "")
        if re.split(r"[.=]", ours)[0] not in known:
            ours = ""
        if not ours and "needless" not in facts:
            if "." in typed and (hint := instead_of(typed.partition(".")[0])):
                raise ConfigError(f"pass {typed}", "there is no such flag", hint)
            result.append(argument)
            continue
        switch = "=" in ours or ours.startswith("--no-") if ours else facts.get("only") == ""
        given = [value] if equals else [] if switch or not rest or rest[0].startswith("--") else [rest.popleft()]
        shown = " ".join([flag, *given])
        if ours:
            put = [one for text in given for one in _values(facts.get("read", {}), text)]
            result += [f"{ours}={one}" for one in put] or [ours]
            if ours != flag or put != given:
                notes.append(f"{shown} is {' '.join([ours, *put])} here")
        elif not given or re.fullmatch(facts.get("only", ".*"), given[0], re.DOTALL):
            notes.append(f"{shown} changes nothing here: {facts['needless']}")
        else:
            result += [argument, *([] if equals else given)]  # the command will refuse it, with what to do
    return result, notes


def _values(reader: str | dict[str, str], text: str) -> list[str]:
    return READERS[reader](text) if isinstance(reader, str) else [reader.get(text, text)]


def instead_of(name: str) -> str:
    """What to do in place of passing this flag, or of calling this command; "" where nothing is known of it."""
    return str(other_names().get(name.replace("_", "-"), {}).get("instead", ""))
