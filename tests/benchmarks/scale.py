"""What many engine cores behind one server cost their middle: `python -m tests.benchmarks.scale`.

Three things grow with the number of cores. Each is the code that serves, on this machine, at every size up to 1,000:

- lockstep: what a core does for one step: it writes its number on the page, and reads everybody's, which is new each
  time. The others are a second process, which writes all their numbers at once. That the last core wakes as many
  sleepers as there are others is the system's time, and is not in it.
- the router: what one request costs in the frontend, which looks at every core's load, with a prompt of 512 blocks that
  one of them holds.
- news: what one step of all cores costs in the frontend, which reads a message of each with the tokens of 32 requests.

Processor time of one thread, medians. Nothing here waits, so a busy machine changes little.

A fourth is simulated: what lockstep loses because a step is as long as its longest. Each core decodes 32 requests, and
prompts of 1,000 tokens on average (lognormal) come to it as often as their computation takes a tenth of its time alone;
a step computes one chunk of a prompt at most. A step takes 10 ms and 0.01 ms a token. What is told is the time that
cores compute of the time that steps take.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from engine.interfaces.context import RouterContext
from engine.interfaces.router import RankLoad
from engine.plugin import Registry, load_body
from engine.process.wire import decoder, encode
from engine.types.messages import FromCore
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine_parallel.lockstep import Star

SIZES = (2, 8, 32, 128, 512, 1000)
CHUNKS = (8192, 2048, 512, 128)
BLOCK = 16
ROWS = 32


def median_ms(work: Callable[[], object], count: int) -> float:
    """Of the thread's processor time."""
    found = []
    for _ in range(count):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return 1000 * statistics.median(found)


def lockstep_ms(size: int, count: int = 60) -> float:
    """A core's part of a step."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        address = f"ipc://{folder}/star"
        if (pid := os.fork()) == 0:
            try:
                stars = [Star(address, rank, size) for rank in range(1, size)]
                pages = [page for star in stars if (page := star._page) is not None]
                for step in range(1, count + 1):
                    for page in pages:
                        page.tell(step, 16 + 2 * (step & 1))
                    while pages[0].wait(step) is None:
                        pass
            finally:
                os._exit(0)
        star = Star(address, 0, size)
        star._awake = True
        try:
            return median_ms(lambda: star.agree(8, True), count)
        finally:
            star.close()
            os.waitpid(pid, 0)


def route_ms(name: str, size: int, count: int = 100) -> float:
    """One request, by loads that are there: what a client takes to collect them is not counted."""
    registry = Registry.discover()
    candidate = registry.find("router", name)
    card = registry.card(candidate)
    assert card.Options is not None
    context = RouterContext(
        num_ranks=size, max_num_seqs=256, block_size=BLOCK, cached_tokens=1 << 20, options=card.Options()
    )
    router = load_body(card, candidate=candidate)(context)
    prompt = [i % 1000 for i in range(512 * BLOCK)]
    request = [EngineRequest(request_id="r", prompt_token_ids=prompt, params=SamplingParams())]

    def route() -> None:
        router.route(request, [RankLoad(rank, 100, rank % 3, 0.5) for rank in range(size)])

    return median_ms(route, count)


def news_ms(count: int = 200) -> tuple[float, int]:
    """Reading a core's message of a step, and its bytes."""
    outputs = [CoreOutput(request_id=f"cmpl-{i:032x}", new_token_ids=[i]) for i in range(ROWS)]
    message = encode(CoreOutputs(outputs=outputs, stats=StepStats(num_running=ROWS, num_tokens=ROWS)))
    decode = decoder(FromCore).decode
    return median_ms(lambda: decode(message), count), len(message)


def busy_share(size: int, chunk: int, steps: int = 2000) -> float:
    """Of all steps' time, what the mean core computes in it; chunk: most tokens of a prompt in a step."""
    random, left, busy, taken = np.random.default_rng(0), np.zeros(size), 0.0, 0.0
    base, each = 0.010 + 0.00001 * ROWS, 0.00001
    for _ in range(steps):
        tokens = np.minimum(left, chunk)
        left -= tokens
        seconds = base + each * tokens
        busy += seconds.mean()
        taken += seconds.max()
        arrived = random.poisson(0.1 * seconds.max() / (1000 * each), size)
        for core in np.flatnonzero(arrived):
            left[core] += random.lognormal(np.log(1000) - 0.5, 1.0, arrived[core]).sum()
    return busy / taken


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    news, size_of_news = news_ms()
    print(f"{'cores':>5}  {'lockstep: bytes read':>20}  {'a core, ms':>10}  ", end="")
    print(f"{'least_loaded, ms':>16}  {'prefix_aware, ms':>16}  {'news, ms':>8}  {'bytes':>9}")
    for size in SIZES:
        row = f"{size:5}  {8 * size:20,}  {lockstep_ms(size):10.3f}  "
        row += f"{route_ms('least_loaded', size):16.3f}  {route_ms('prefix_aware', size):16.3f}  "
        print(row + f"{size * news:8.2f}  {size * size_of_news:9,}", flush=True)
    print("lockstep and news: of one step of all cores; routers: of one request")
    print(f"\n{'cores':>5}  cores compute, of the time that steps take, with chunks of at most so many tokens")
    print(f"{'':5}  " + "".join(f"{chunk:>8,}" for chunk in CHUNKS))
    for size in SIZES:
        print(f"{size:5}  " + "".join(f"{busy_share(size, chunk):8.0%}" for chunk in CHUNKS), flush=True)


if __name__ == "__main__":
    main()
