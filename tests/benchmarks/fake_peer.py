"""A worker of the tests: it speaks the protocol and counts instead of computing; `FAKE` in its environment: it lies."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from tests.benchmarks.peers.protocol import Settings, serve


class FakePeer:
    """Answers each prompt with the numbers after its last token."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def prepare(self, settings: Settings) -> None:
        """Leave a mark."""
        settings.converted_folder.mkdir(parents=True, exist_ok=True)

    def load(self, settings: Settings) -> Sequence[str]:
        """Nothing, or fail."""
        if self._fault == "load":
            raise RuntimeError("there is no such model")
        if self._fault == "die":
            print("out of everything", file=sys.stderr, flush=True)
            os._exit(3)
        print("noise on the standard output", flush=True)
        return ("numpy", "there-is-no-such-distribution")

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Count."""
        time.sleep(0.001)
        if self._fault == "short":
            output_lens = [max(n - 1, 1) for n in output_lens]
        if self._fault == "strange":
            return [[-1] * n for n in output_lens]
        if self._fault == "slow clock":
            began = time.perf_counter()
            time.perf_counter = lambda: began + 0.001  # type: ignore[assignment]
            time.sleep(1.5)
        return [[(prompt[-1] + 1 + i) % 64 for i in range(n)] for prompt, n in zip(prompts, output_lens, strict=True)]


if __name__ == "__main__":
    serve(FakePeer(os.environ.get("FAKE", "")))
