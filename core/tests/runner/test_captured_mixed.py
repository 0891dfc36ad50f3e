"""Steps with prompts in them, captured: padded by rows without tokens and by tokens behind the last row."""

from __future__ import annotations

import numpy as np
import pytest
from harness import BucketPlatformBody, Driver, Request, params, prompt, started

from engine.interfaces.platform import CaptureKey
from engine.runner.worker import TorchWorker

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
FORMS = [(3, (6,)), (0, (1, 12)), (5, (2, 7)), (0, (40,)), (2, (30, 8)), (4, (7,)), (6, (3, 3)), (7, (60,))]
"""Of steps in a row: how many of the requests that began decode, and chunks of prompts that are computed beside."""


def captures(worker: TorchWorker) -> dict[CaptureKey | None, int]:
    runner = worker._runner
    assert runner is not None and isinstance(runner._platform, BucketPlatformBody)
    return runner._platform.captures


def outputs(worker: TorchWorker, seed: int) -> list[list[int]]:
    """Requests enter one after the other, some in chunks, while the earlier ones decode."""
    driver, slots, random = Driver(worker, seed), iter(range(8)), np.random.default_rng(seed)
    decoding: list[Request] = []
    begun: list[Request] = []
    for number, (decodes, chunks) in enumerate(FORMS):
        work, new = [(request, 1) for request in decoding[:decodes]], []
        for chunk in chunks:
            slot = next(slots, None)
            if slot is None:
                continue
            length = chunk + int(random.integers(0, 2)) * 5
            new.append(Request(prompt(length, seed + slot), params(**SAMPLED if slot % 2 else {}), slot=slot))
            work.append((new[-1], chunk))
        if work:
            driver.step(*work)
        rest = [(request, len(request.prompt) - request.computed) for request in new if not request.outputs]
        if rest:
            driver.submit(*((request, 1) for request in decoding[: number % 3]), *rest)
            driver.take()
        decoding += new
        begun += new
    return [request.outputs for request in begun]


@pytest.mark.parametrize("seed", range(3))
def test_they_give_the_tokens_of_uncaptured_ones(seed: int) -> None:
    plain, captured = started(), started(platform="buckets", attention="capturable")
    assert outputs(plain, seed) == outputs(captured, seed)
    replayed = captures(captured)
    assert replayed[CaptureKey(12, 0)] > 0 and replayed[CaptureKey(40, 0)] > 0, "no step was captured"
    runner = captured._runner
    assert runner is not None
    assert not runner._slots.tables.tokens[runner._slots.scratch_slot].any(), "nothing is drawn for padding"


def test_which_one_computes_a_step() -> None:
    """The smallest with as many tokens, and twice as many as rows; none that is larger than all of them."""
    worker = started(platform="buckets", attention="capturable", max_num_seqs=16)
    driver = Driver(worker)
    small = [Request(prompt(1 + 2 * (i == 0), i), params(), slot=i) for i in range(7)]

    def counts() -> tuple[int, int, int]:
        found = captures(worker)
        return found[CaptureKey(12, 0)], found[CaptureKey(40, 0)], found.get(None, 0)

    before = counts()
    driver.step(*((request, len(request.prompt)) for request in small))  # 9 tokens of 7 rows
    assert np.subtract(counts(), before).tolist() == [0, 1, 0]
    driver.step((Request(prompt(12), params(), slot=8), 12))
    assert np.subtract(counts(), before).tolist() == [1, 1, 0]
    driver.step((small[0], 1), (Request(prompt(12), params(), slot=9), 12))
    assert np.subtract(counts(), before).tolist() == [1, 2, 0]
    driver.step((Request(prompt(41), params(), slot=10), 41))
    assert np.subtract(counts(), before).tolist() == [1, 2, 1]


def test_a_part_of_a_prompt_draws_nothing() -> None:
    """No row of the step draws, and it is captured all the same."""
    worker, plain = started(platform="buckets", attention="capturable"), started()
    found = []
    for each in (worker, plain):
        driver, request = Driver(each), Request(prompt(20), params(), slot=0)
        result = driver.step((request, 9))
        assert result.tokens.tolist() == [-1]
        driver.step((request, 11))
        driver.step((request, 1))
        found.append(request.outputs)
    assert found[0] == found[1] and captures(worker)[CaptureKey(12, 0)] == 2
