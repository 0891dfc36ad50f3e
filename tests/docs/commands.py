"""The `engine ...` command lines in the texts, and what the program says to them."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from engine.cli.main import _find, canonical, split_name
from engine.plugin.hints import known_drivers
from tests.benchmarks.__main__ import parser as benchmarks_parser
from tests.docs.markdown import blocks, spans

_SHELL = ("sh", "bash", "shell", "")
_ASSIGNMENT = re.compile(r"\A[A-Z_]+=\S*\Z")
_NO_COMMAND = ("--help", "-h", "--version", "-V", "help")


def command_lines(page: Path) -> list[str]:
    """Every command line of the program on a page: in shell blocks, and in code spans that begin with it."""
    found = []
    for block in blocks(page):
        if block.language in _SHELL:
            text = block.text.replace("\\\n", " ")
            found += [line.strip() for line in text.splitlines() if is_command(line)]
    return found + [span for span in spans(page) if is_command(span)]


def is_command(line: str) -> bool:
    """Whether a shell line calls the program. (`engine-tiny/`, `engine.errors` and prose do not.)"""
    return bool(words(line)) and len(words(line)) > 1


def words(line: str) -> list[str]:
    """The program's arguments with its name, up to a pipe or a redirection; [] where another program is called."""
    try:
        found = shlex.split(line.strip().removeprefix("$ "), comments=True)
    except ValueError:
        return []
    while found and _ASSIGNMENT.match(found[0]):
        found = found[1:]
    for i, word in enumerate(found):
        if word in ("|", ">", ">>", "<", "&", "&&", ";", "2>"):
            found = found[:i]
            break
    return found if found and found[0].rpartition("/")[2] == "engine" else []


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command, as the program makes it. Raises for a command that there is not."""
    command = _find(name)
    parser = argparse.ArgumentParser(
        prog=f"engine {name}", allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    command.add_arguments(parser)
    return parser


def parse(line: str) -> None:
    """Parse a command line as the program would. Raises where it would refuse it."""
    name, rest = split_name(words(line)[1:])
    if name in _NO_COMMAND:
        return
    wanted = [word for word in rest if word not in ("--help", "-h")]  # these end the program in the parser
    _, unknown = parser_of(name).parse_known_args(canonical(wanted))
    if unknown:
        raise ValueError(f"{line!r}: {unknown} is not understood")


def flags() -> set[str]:
    """Every flag of every command of ours, and of what measures the insides."""
    found: set[str] = set()
    pending = [parser_of(name) for name in known_drivers()["commands"]]
    pending.append(benchmarks_parser())
    while pending:
        for action in pending.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                pending += action.choices.values()
    return found
