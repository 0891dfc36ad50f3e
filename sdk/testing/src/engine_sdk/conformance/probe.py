"""Import cards as if each had a fresh process, and see what that costs and brings along.

`python -P probe.py` reads requests on stdin, a line of JSON each, and answers each with one. What a card may bring
along is imported once; then each card is imported in a fork. This file is run as a script: it must import nothing of
the kit.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

HEAVY = ("torch", "jax", "tensorflow", "triton", "transformers", "cupy", "numba", "scipy", "pandas")
LONGEST = 100
"""Seconds that an import may take."""


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what cards print is no answer
    for line in sys.stdin:
        _import_what_cards_may_bring()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            signal.alarm(LONGEST)
            try:
                found = _answer(json.loads(line))
            except BaseException:
                found = {"error": traceback.format_exc()}
            with os.fdopen(writer, "w") as pipe:
                json.dump(found, pipe)
            sys.stderr.flush()
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(said or json.dumps({"error": f"it ended with code {code}"}), file=answers)


def _import_what_cards_may_bring() -> None:
    """Also pydantic's first model class."""
    import msgspec  # noqa: F401
    import numpy  # noqa: F401
    import pydantic

    class Warm(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid", frozen=True)
        field: int = pydantic.Field(1, ge=1)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Of one request: the card's module and name, the point's interface, needs to ask the card about, where modules are
    looked for, and the environment."""
    import msgspec

    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update(request["environment"])
    interface = importlib.import_module(request["interface"])
    importlib.import_module("engine.types.errors")
    start = time.process_time()
    module = importlib.import_module(request["module"])
    seconds = time.process_time() - start
    card = module
    for part in request["name"].split("."):
        card = getattr(card, part)
    answers = []
    for need in request["needs"]:
        kind = getattr(interface, need["kind"]) if need else None
        asked = msgspec.convert(need["fields"], kind) if kind else None
        answers.append(card.unsupported(asked))
    heavy = [name for name in HEAVY if name in sys.modules]
    return {"seconds": seconds, "heavy": heavy, "answers": answers}


if __name__ == "__main__":
    main()
