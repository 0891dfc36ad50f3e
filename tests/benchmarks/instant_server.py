"""`engine` whose worker's tokens are there at once: `python -m tests.benchmarks.instant_server RATE serve ...`."""

from __future__ import annotations

import runpy
import sys

from engine.frontend import launch
from tests.benchmarks.instant_worker import worker_class

if __name__ == "__main__":
    launch.CORE_WORKER = worker_class(float(sys.argv.pop(1)))
    runpy.run_module("engine", run_name="__main__")
