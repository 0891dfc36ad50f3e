"""Import a card in a fresh process, and see what it costs and brings along. `python probe.py` reads a request on stdin.

This file is run as a script: it must import nothing of the kit.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

HEAVY = ("torch", "jax", "tensorflow", "triton", "transformers", "cupy", "numba", "scipy", "pandas")


def main() -> None:
    """Answer one request: the card's module and name, the point's interface, and needs to ask the card about."""
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    # What a card may bring along is there before the clock starts, pydantic's first model class with it.
    import msgspec
    import numpy as np
    import pydantic

    del np

    class Warm(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid", frozen=True)
        field: int = pydantic.Field(1, ge=1)

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
    print(json.dumps({"seconds": seconds, "heavy": heavy, "answers": answers}))


if __name__ == "__main__":
    main()
