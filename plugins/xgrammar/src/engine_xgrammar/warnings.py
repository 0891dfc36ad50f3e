"""What XGrammar warns of: it says on standard error what it passes over, and goes on."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_WARNING = re.compile(rb"^\[[\d:]+\] \S+?\.(?:cc|h):\d+: Warning: (.*)\n?", re.MULTILINE)
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def listening() -> Iterator[list[str]]:
    """What the library warns of meanwhile; complete once it is over. What else comes is passed on."""
    warnings: list[str] = []
    with _ONE_AT_A_TIME, tempfile.TemporaryFile() as heard:
        before = os.dup(2)
        os.dup2(heard.fileno(), 2)
        try:
            yield warnings
        finally:
            os.dup2(before, 2)
            heard.seek(0)
            said = heard.read()
            warnings += [found[1].decode(errors="replace") for found in _WARNING.finditer(said)]
            if rest := _WARNING.sub(b"", said):
                os.write(before, rest)
            os.close(before)
