"""Lines typed in a terminal, with editing and history."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

HISTORY_LENGTH = 1000


class LineReader:
    """Lines typed by a user, with editing, arrow keys through the history, and Tab for commands.

    Args:
        history: the file that keeps the lines; None keeps none. What cannot be read or written is done without.
        words: what Tab completes at the beginning of a line.
    """

    def __init__(self, history: Path | None, words: Sequence[str] = ()) -> None:
        self._readline = _readline()
        self._history = history
        self._words = words
        if self._readline is None:
            return
        # Only what is said to the model is remembered, not every answer to a question of ours.
        self._readline.set_auto_history(False)
        self._readline.set_history_length(HISTORY_LENGTH)
        self._readline.set_completer_delims("")
        self._readline.set_completer(self._complete)
        libedit = "libedit" in (self._readline.__doc__ or "")
        self._readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        if not libedit:  # pasted lines are one text, not many questions (Python turns it off)
            self._readline.parse_and_bind("set enable-bracketed-paste on")
        if history is not None:
            with contextlib.suppress(OSError):
                self._readline.read_history_file(history)

    def read(self, prompt: str) -> str:
        """One line. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        return input(prompt)

    def interrupted_line(self) -> str:
        """What had been typed when Ctrl-C was pressed; empty where that is not known."""
        return "" if self._readline is None else str(self._readline.get_line_buffer())

    def remember(self, line: str) -> None:
        """Put a line into the history."""
        if self._readline is None:
            return
        count = self._readline.get_current_history_length()
        if count and self._readline.get_history_item(count) == line:
            return
        self._readline.add_history(line)
        if self._history is not None:
            with contextlib.suppress(OSError):
                # What is asked of a model is nobody else's business.
                self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
                self._readline.write_history_file(self._history)

    def _complete(self, text: str, state: int) -> str | None:
        matches = [word for word in self._words if word.startswith(text)] if text else []
        return matches[state] if state < len(matches) else None


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # not on every platform: then lines are plain
        return None
    return readline
