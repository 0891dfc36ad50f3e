"""A virtual environment for each peer, in the cache folder; made at the first call, kept for the next."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from tests.benchmarks.peers.peer import LEVELS, Peer

INSTALL_SECONDS = 3600
_LAST_LINES = 2


class InstallError(Exception):
    """A peer cannot be had here; the message says why, `log` where all that was said is kept."""

    def __init__(self, text: str, log: Path) -> None:
        super().__init__(text)
        self.log = log


def default_cache() -> Path:
    """A folder under the user's cache (the XDG base directory)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "engine-peers"


def interpreter(peer: Peer, cache: Path, jobs: int, level: str = "") -> Path:
    """The Python that has this engine. Where it is not installed, or another version is, its environment is made anew.

    Args:
        jobs: compilers at once, for what is built from source.
        level: see `LEVELS`; what is built from source has an environment for each.

    Raises InstallError with pip's last lines.
    """
    if peer.steps is None:
        return Path(sys.executable)
    built = any("--no-binary" in step for step in peer.steps)
    folder = cache / "environments" / (f"{peer.name}-{level}" if built and level else peer.name)
    python, done = folder / "bin" / "python", folder / "installed.json"
    narrowed = LEVELS[level] if built else {}
    wanted = {"steps": [list(step) for step in peer.steps], "environment": {**peer.install_environment, **narrowed}}
    if python.exists() and done.exists() and json.loads(done.read_text()) == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = cache / "logs" / f"install-{peer.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {name: text.format(jobs=jobs) for name, text in peer.install_environment.items()}
    environment |= narrowed
    commands = [[sys.executable, "-m", "venv", str(folder)]]
    commands += [[str(python), "-m", "pip", "--disable-pip-version-check", *step] for step in peer.steps]
    with log.open("w") as out:
        for command in commands:
            print(f"$ {' '.join(command)}", file=out, flush=True)
            what = "python -m venv" if command[2] == "venv" else "pip " + " ".join(command[4:])
            _run(what, command, log, out, environment, cache)
    done.write_text(json.dumps(wanted))
    return python


def _run(what: str, command: list[str], log: Path, out: TextIO, environment: dict[str, str], folder: Path) -> None:
    try:
        # Others may work on this machine: an installation has time. Not in the tree, where pip would find our packages.
        done = subprocess.run(
            ["nice", "-n", "19", *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            timeout=INSTALL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{what}: {error}", log) from error
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and line[:2] != "$ "]
        raise InstallError(f"{what} failed: {' | '.join(lines[-_LAST_LINES:])}", log)
