"""What entry points name: the card of a driver, which describes it before anything heavy is imported, and commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    import argparse

    from pydantic import BaseModel

VARIES = "a row's bits may depend on what is computed beside it: its card does not say batch_invariant"


class Card:
    """Base of every point's card interface. A card is a class that is never instantiated: all methods are classmethods.

    The module that holds a card imports in under 20 ms beyond pydantic, msgspec and numpy, and never torch: what does
    the work stands in `body` and is imported only when the driver is chosen.
    """

    priority: ClassVar[int] = 0
    """Order in `auto`: higher first, ties by name. A reference driver stands at 0, a faster one above."""

    by_name: ClassVar[bool] = False
    """Whether it is never taken by itself, but only where a user names it: where it computes something else, say."""

    requires_minor: ClassVar[int] = 0
    """The lowest minor version of the point's interface that this driver needs."""

    Options: ClassVar[type[BaseModel] | None] = None
    """A pydantic model of the driver's own options, set as `--<point>.<option> value`; None where it has none."""

    body: ClassVar[str] = ""
    """"package.module:Class" of the code that does the work."""

    bodies: ClassVar[Mapping[str, str]] = {}
    """For points with halves in two processes: one body for each half, e.g. {"core": ..., "worker": ...}."""

    framework: ClassVar[str | None] = None
    """"torch" or "jax" where the body computes with one; None where it does not matter."""

    batch_invariant: ClassVar[bool] = False
    """Whether a row's results have the same bits alone and in any batch, in whatever steps it is computed, on any
    number of threads. Asked of the points whose need has `batch_invariant`, where a user wants nothing else."""

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{cls.__qualname__} is a card: use the class itself, cards are never instantiated")

    @classmethod
    def mismatches(cls, need: Any) -> list[str]:
        """The reasons that follow from what the card declares: its framework, `batch_invariant`, at some points more.

        They stand before those of `unsupported`, so that no driver's `unsupported` has to state them. Interfaces
        override this, drivers do not.
        """
        reasons: list[str] = []
        wanted = getattr(need, "framework", None)
        if wanted is not None and cls.framework not in (None, wanted):
            reasons.append(f"it computes with {cls.framework}, the platform with {wanted}")
        if getattr(need, "batch_invariant", False) and not cls.batch_invariant:
            reasons.append(VARIES)
        return reasons

    @classmethod
    def unsupported(cls, need: Any) -> list[str]:
        """The reasons why this driver cannot serve `need`, of its point's interface; an empty list means that it can.

        Pure and cheap: asked by the launcher before any body is imported, and again by each worker on its real device.

        Returns one sentence a reason, each understandable alone ("head size 80 is not a multiple of 32").
        """
        return []

    @classmethod
    def remarks(cls, need: Any) -> list[str]:
        """What a user should know of this driver where it serves `need`; mostly nothing.

        `engine plugins why` prints them for a driver that is at work. They are no reasons against it: that it was never
        run on such a device, say. Pure and cheap, and of sentences that are understandable alone, as `unsupported` is.
        """
        return []


class Command:
    """A command of the `engine` program; plugins add theirs in the entry-point group `engine.commands.v0`. Its module
    is imported when the command is called, not for `--help`."""

    help: ClassVar[str] = ""
    """One line on what it does. `engine --help` reads it from the source: a plain text, set before the methods."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's own arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it. The answer is the exit code; an `EngineError` is printed as one message, with exit code 2."""
        raise NotImplementedError
