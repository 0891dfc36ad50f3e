"""Commands of the `engine` program; plugins add theirs in the entry-point group `engine.commands.v0`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import argparse


class Command:
    """One command. An entry point names a subclass; it is imported when the command is called, not for `--help`."""

    help: ClassVar[str] = ""
    """One line on what it does. `engine --help` reads it from the source, so write a plain text there."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's own arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it. The answer is the exit code; an `EngineError` is printed as one message, with exit code 2."""
        raise NotImplementedError
