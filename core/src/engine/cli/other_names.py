"""Flags of vLLM's commands that have another name here, or need none: a copied command runs, and says in a line a flag
what became of it. What would mean something else is refused, with what to do.

The flags stand in files: `vllm_flags.toml` beside this one, and those that `Settings.vllm_flags` of plugins name.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from engine.types.errors import ConfigError

log = logging.getLogger(__name__)


class Needless(NamedTuple):
    """A flag that would change nothing.

    Args:
        why: it would not.
        values: that it may have: None for any one, () for a switch, which has none; with others it is refused.
    """

    why: str
    values: Collection[str] | None = None


class OtherNames(NamedTuple):
    """The tables of the files, by flag; what each holds is said there."""

    same: dict[str, str]
    needless: dict[str, Needless]
    refused: dict[str, str]
    values: dict[str, str | dict[str, str]]
    commands: dict[str, str]


@cache
def other_names() -> OtherNames:
    """All that are known. A plugin's file that cannot be read is left out, with a warning; where it has a flag of ours,
    ours holds."""
    from engine.config.declaration import of_commands

    found = OtherNames({}, {}, {}, {}, {})
    files = [declared.vllm_flags for declared in of_commands().values()]
    for path in (*files, Path(__file__).with_name("vllm_flags.toml")):
        if path is None:
            continue
        try:
            names = _read(path)
        except Exception:
            log.warning("the flags in %s cannot be read", path, exc_info=True)
            continue
        found.same.update(names.same)
        found.needless.update(names.needless)
        found.refused.update(names.refused)
        found.values.update(names.values)
        found.commands.update(names.commands)
    return found


def _read(path: Path) -> OtherNames:
    import tomllib

    table = tomllib.loads(path.read_text(encoding="utf-8"))
    needless = {flag: Needless(why) for flag, why in table.get("needless", {}).items()}
    needless |= {flag: Needless(why, ()) for flag, why in table.get("needless_switches", {}).items()}
    needless |= {flag: Needless(**facts) for flag, facts in table.get("needless_values", {}).items()}
    same, refused, values, commands = (dict(table.get(name, {})) for name in ("same", "refused", "values", "commands"))
    return OtherNames(same, needless, refused, values, commands)


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
    names = other_names()
    result: list[str] = []
    notes: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            return [*result, argument, *rest], notes
        typed, equals, value = argument.partition("=")
        flag = typed if "." in typed else typed.replace("_", "-")
        if flag in known:
            ours, needless = flag if flag in names.values else "", None
        else:
            ours = names.same.get(flag, "")
            ours = ours if re.split(r"[.=]", ours)[0] in known else ""
            needless = None if ours else names.needless.get(flag)
        if not argument.startswith("-") or not (ours or needless):
            if "." in typed and (hint := instead_of(typed.partition(".")[0])):
                raise ConfigError(f"pass {typed}", "there is no such flag", hint)
            result.append(argument)
            continue
        switch = "=" in ours or ours.startswith("--no-") if needless is None else needless.values == ()
        given = [value] if equals else [] if switch or not rest or rest[0].startswith("--") else [rest.popleft()]
        shown = " ".join([flag, *given])
        if needless is None:
            put = [one for text in given for one in _values(names.values.get(flag, {}), text)]
            result += [f"{ours}={one}" for one in put] or [ours]
            if ours != flag or put != given:
                notes.append(f"{shown} is {' '.join([ours, *put])} here")
        elif not given or needless.values is None or given[0] in needless.values:
            notes.append(f"{shown} changes nothing here: {needless.why}")
        else:
            result += [argument, *([] if equals else given)]  # the command will refuse it, with what to do
    return result, notes


def _values(reader: str | dict[str, str], text: str) -> list[str]:
    return READERS[reader](text) if isinstance(reader, str) else [reader.get(text, text)]


def instead_of(flag: str) -> str:
    """What to do in place of passing this flag; "" where nothing is known of it."""
    return other_names().refused.get(flag.replace("_", "-"), "")
