"""The requests of nano-vllm's benchmark (https://github.com/GeeeekExplorer/nano-vllm, bench.py), drawn as it draws."""

from __future__ import annotations

import random
from typing import NamedTuple

NUM_REQUESTS, LEAST, MOST = 256, 100, 1024
LAST_ID = 10_000


class Request(NamedTuple):
    """One request: its prompt's ids, and how many tokens it generates."""

    prompt: list[int]
    output_len: int


def nano_vllm() -> list[Request]:
    """256 requests, lengths uniform in 100..1024, seed 0: prompts first, then the outputs' lengths."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, LAST_ID) for _ in range(draw.randint(LEAST, MOST))] for _ in range(NUM_REQUESTS)]
    return [Request(prompt, draw.randint(LEAST, MOST)) for prompt in prompts]
