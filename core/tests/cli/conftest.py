"""The program, run in this process or as a user runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.cli.main import main


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path_factory):
    import os

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))

    for name in [name for name in os.environ if name.startswith("ENGINE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def program(capsys):
    """Run in this process: exit code, standard output, standard error."""

    def run(*arguments):
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def process():
    """Run as a child process."""

    def run(*arguments, **options):
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)

    return run
