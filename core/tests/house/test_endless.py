"""A test that waits for ever ends the run of no other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFTEST = f"""
import runpy
globals().update(runpy.run_path({str(ROOT / "conftest.py")!r}))
pytest_runtest_setup.__globals__["LONGEST"] = 2.0
"""
TESTS = """
import subprocess, sys, threading, time, pytest

time.sleep(1)  # both processes that take others' places collect at the same time

class TestFirst:
    @pytest.mark.parametrize("i", range(20))
    def test_waits(self, i):
        if i == 7:
            left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open("left", "w").write(str(left.pid))
            threading.Event().wait()

@pytest.mark.parametrize("i", range(9))
def test_ends(i):
    pass

@pytest.fixture
def endless():
    yield
    threading.Event().wait()

def test_fails_first(endless):
    raise ValueError

def test_one(): pass
def test_two(): pass
def test_three(): pass
def test_four(): pass
"""


@pytest.mark.slow
def test_it_fails_by_name_and_all_others_are_run(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    flags = ["-n", "2", "--dist", "loadgroup", "-c", os.devnull, "--rootdir", ".", "--import-mode=importlib"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *flags], cwd=tmp_path, env=outer, capture_output=True, text=True, timeout=120
    )
    assert "3 failed, 32 passed" in run.stdout, run.stdout + run.stderr  # one fails before it waits
    assert "test_waits[7]'" in run.stdout and "test_fails_first'" in run.stdout
    assert "in test_waits\n" in run.stderr and "in endless\n" in run.stderr
    assert not Path("/proc", (tmp_path / "left").read_text()).exists()
