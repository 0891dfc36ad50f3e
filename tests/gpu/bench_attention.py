"""Attention drivers side by side: the same shapes through each that is installed, in a model of a few layers.

python -m tests.gpu.bench_attention
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

from engine import EngineConfig
from engine.plugin import Registry
from engine.types.errors import EngineError
from engine_bench.session import open_session
from tests.gpu.bench_engine import PROMPT, Bench, wait
from tests.gpu.rows import Row, tell

MODEL, LAYERS = "dummy:llama-8B", 4
DECODES = ((1, 8000), (256, 1000))
"""Rows, and the tokens of context that each has."""


def measure(driver: str, model: str, settings: dict[str, Any]) -> str:
    """A driver's times in one line. Raises EngineError where it does not serve."""
    config = EngineConfig(**({"model": model, "attention": driver} | settings))
    with open_session(config) as session:
        bench = Bench(session, driver, (1.0, 1.0))
        bench.decode_seconds(1, 16, 8)
        found = []
        for rows, context in DECODES:
            seconds, _ = bench.decode_seconds(rows, context, 32)
            found.append(f"decode {rows} x {context}: {seconds * 1e3:.2f} ms")
        (row,) = list(bench.prefill())
        wait()
        return "; ".join([*found, f"8k prefill: {row.result}"]) + f"; captured {len(session.ready.captured)}"


def main() -> None:
    """One row a driver."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_attention", description=__doc__)
    flags.add_argument("--model", default=f"{MODEL},layers={LAYERS}")
    flags.add_argument("--platform", default="cuda")
    asked = flags.parse_args()
    settings: dict[str, Any] = {
        "platform": asked.platform,
        "dtype": "bfloat16",
        "max_model_len": PROMPT + 64,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 16384,
        "enable_prefix_caching": False,
    }
    for candidate in Registry.discover().candidates("attention"):
        what = f"attention {candidate.name}, {LAYERS} layers of Llama 8B"
        try:
            tell(Row(what=what, result=measure(candidate.name, asked.model, settings)))
        except EngineError as error:
            tell(Row(what=what, result=f"not run: {error.found}"[:240]))
        except Exception as error:  # one driver's fault is not the others'
            tell(Row(what=what, result=f"failed: {type(error).__name__}: {error}"[:240]))
        gc.collect()


if __name__ == "__main__":
    main()
