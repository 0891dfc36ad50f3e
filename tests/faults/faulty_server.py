"""`engine` with the worker to which something happens: `python -m faulty_server serve ...`, see `faulty`."""

from __future__ import annotations

import os
import sys
import time

from jumping_clock import jumping

from engine.cli.main import main
from engine.frontend import launch

if __name__ == "__main__":
    if os.environ.get("FAULT_CLOCK"):
        time.time = jumping()
    launch.CORE_WORKER = "fault_worker:FaultyWorker"
    sys.exit(main())
