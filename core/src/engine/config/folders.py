"""The user's own folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where what outlives a program is kept (the XDG base directory for state). It is not created here.

    Raises RuntimeError where the user has no home.
    """
    environ = os.environ if environ is None else environ
    given = environ.get("XDG_STATE_HOME", "")
    # The specification has relative paths ignored.
    base = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    return base / "engine"
