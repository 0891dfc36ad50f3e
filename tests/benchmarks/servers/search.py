"""The highest rate at which the first token still comes in time: one server, one round."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.types.errors import EngineError
from engine_bench.replay import ReplayOptions, measure_replay
from engine_bench.report import Report
from engine_bench.serve import ServeOptions
from engine_bench.workload import Lengths
from tests.benchmarks.servers.results import Load, Point, rate_of

KEPT = (
    "conversations", "completed", "seconds", "input_tokens", "output_tokens", "requests_per_s", "output_tokens_per_s",
    "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "itl_ms_p50", "itl_ms_p99", "good_requests",
    "goodput_per_s", "sent_late_ms_p99",
)  # fmt: skip
"""Figures that the results keep."""
LOWEST, HIGHEST = -48, 80
"""Places of the grid: a conversation in 64 s, and a thousand a second."""
FIRST_STEP, NEXT_STEP = 8, 2
"""How far the search goes for the limit's other side: in a first round, and from the limit of the round before. Each
further step is twice as far, up to a rate that is twice or half as high: a server that is far behind takes long."""
TIMEOUT = 20.0
"""Seconds for a request: at a rate that is far too high the queue would grow for as long as conversations begin."""


def measure(url: str, load: Load, place: int, seed: int) -> Point:
    """One rate. The same seed asks every server for the same.

    Raises EngineError where the server refuses the first request, which comes before all that is measured.
    """
    wall, processor = time.perf_counter(), time.process_time()
    report = _replay(url, load, rate_of(place), max(2, round(rate_of(place) * load.seconds)), seed)
    share = (time.process_time() - processor) / (time.perf_counter() - wall)
    figures = {name: float(report.figures[name]) for name in KEPT if name in report.figures}
    faults = faults_of(report)
    in_time = figures.get("ttft_ms_p99", float("inf")) <= load.slo_ttft * 1e3
    figures["client_cores"] = share
    return Point(place=place, figures=figures, faults=faults, keeps=in_time and not faults)


def warm_up(url: str, load: Load) -> float:
    """As many conversations as may run, at once and not measured: the same for every server. Returns how many tokens
    their first prompts have on average.

    Raises EngineError where the server does not answer all of it: of a part the average is another.
    """
    report = _replay(url, load, float("inf"), load.max_num_seqs, 0)
    if report.figures["completed"] != report.figures["turns"]:
        raise EngineError("warm the server up", "; ".join(faults_of(report)), "see the server's log")
    return float(report.figures["turn_1_input_tokens"])


def _replay(url: str, load: Load, rate: float, count: int, seed: int) -> Report:
    options = ServeOptions(
        url=url,
        rate=rate,
        burstiness=1.0,
        num_requests=count,
        inputs=Lengths.parse(load.words, "--words"),
        outputs=Lengths.parse(load.output_len, "--output-len"),
        slo_ttft=load.slo_ttft,
        slo_itl=load.slo_tpot,
        timeout=TIMEOUT,
        api_key=None,
        model=None,
        plot=None,
        seed=seed,
    )
    replay = ReplayOptions(
        file=None,
        turns=Lengths.parse(load.turns, "--turns"),
        system_prompts=load.system_prompts,
        system_words=load.system_words,
        think_time=load.think_time,
        max_concurrency=None,
    )
    return measure_replay(options, replay, ())


def faults_of(report: Report) -> list[str]:
    """What was not as asked: requests that failed or were not sent, tokens that are too few or too many, answers that
    ended for another reason than their length."""
    figures = report.figures
    found = [f"{count} {name.removeprefix('errors_')}" for name, count in figures.items() if name.startswith("errors_")]
    if figures["not_sent"]:
        found.append(f"{figures['not_sent']} not sent")
    if figures["output_tokens"] != figures["output_tokens_asked"]:
        found.append(f"{figures['output_tokens']} tokens, not {figures['output_tokens_asked']}")
    if figures.get("finished_length", 0) != figures["completed"]:
        ends = {name.removeprefix("finished_"): n for name, n in figures.items() if name.startswith("finished_")}
        found.append(f"answers ended by {ends}, not all {figures['completed']} by their length")
    return found


def search(at: Callable[[int], Point], start: int, step: int) -> tuple[int | None, list[Point]]:
    """The highest place that keeps the objective, and all that was measured.

    Goes from `start` in steps that grow until the objective is kept on one side and not on the other, then halves what
    lies between. Taken is that whoever keeps it at a rate keeps it at lower ones.

    Args:
        at: measures a place.
        step: the first.
    """
    points: dict[int, Point] = {}

    def keeps(place: int) -> bool:
        if place not in points:
            points[place] = at(place)
        return points[place].keeps

    low, high = LOWEST - 1, HIGHEST + 1
    place = start
    while low < place < high:
        if keeps(place):
            low, place = place, min(place + step, high)
        else:
            high, place = place, max(place - step, low)
        if low >= LOWEST and high <= HIGHEST:
            break
        step = min(2 * step, FIRST_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return (low if low >= LOWEST else None), list(points.values())
