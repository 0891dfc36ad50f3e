"""Starts an executor's workers and waits to be killed: `python -m engine_sdk.conformance.executor.orphans ORDER`."""

from __future__ import annotations

import importlib
import json
import sys
import time

import msgspec

from engine.types.start import WorkerStart
from engine_sdk.conformance.core_contexts import core_context
from engine_sdk.conformance.subject import Subject


def main() -> None:
    """Print the workers' process ids, and stay."""
    order = json.loads(sys.argv[1])
    sys.path[:] = order["path"]
    module, _, name = order["body"].partition(":")
    body = getattr(importlib.import_module(module), name)
    executor = body(core_context(Subject.of_plain(order["subject"]), worker=order["worker"]))
    executor.start(msgspec.convert(order["message"], WorkerStart))
    print(json.dumps([answer[2] for answer in executor.call("who")]), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
