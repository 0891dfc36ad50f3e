"""Rejection sampling through the scheduler and the real runner: the output has the target's distribution."""

from __future__ import annotations

import math

import drafters
import msgspec
import numpy as np
import pytest
import torch
from cores import speculation
from harness import VOCAB, choice, dense_logits, layout, registry, start_message
from paged_worker import HoldingExecutor
from schedules import Planned, Schedule, Settings, run_schedule
from test_real_schedules import Crew

from engine.interfaces.context import CoreContext
from engine.kv.manager import KVManager
from engine.loop.engine_core import EngineCore
from engine.runner.worker import TorchWorker
from engine.scheduling.scheduler import Scheduler
from engine.types.parallel import Parallel
from engine.types.params import SamplingParams
from engine_reference.evictor_lru import LRU
from engine_reference.policy_fcfs import FCFS

SETTINGS = Settings(
    num_pages=600, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=16, in_flight=2,
    enable_prefix_caching=False, hold=False, drafter="any", num_drafts=3, adaptive=False,
)  # fmt: skip
PROMPT, TOP_K, LENGTH = (3, 14, 15), 3, 4


def make_core(drafter: str, options: dict[str, object], stages: int = 1) -> EngineCore:
    found = registry(*drafters.CANDIDATES)
    drafts = drafters.draft_starts(drafter)
    form = drafters.layout_with(drafts) if drafts else layout()
    message = start_message(
        drafts=drafts, layout=form, num_kv_pages=SETTINGS.num_pages, max_num_seqs=SETTINGS.max_num_seqs,
        max_num_batched_tokens=SETTINGS.max_num_batched_tokens, max_model_len=SETTINGS.max_model_len,
    )  # fmt: skip
    chosen = choice(
        found, "drafter", "draft_model" if drafts else drafter, options={"acceptance": "rejection", **options}
    )
    choices = (*message.choices, chosen, *([choice(found, "communicator", "gloo")] if stages > 1 else []))
    message = msgspec.structs.replace(message, choices=choices, parallel=Parallel(pp=stages))
    worker = TorchWorker(message, found) if stages == 1 else Crew(message)
    sizes = {
        "max_num_seqs": SETTINGS.max_num_seqs,
        "max_num_batched_tokens": SETTINGS.max_num_batched_tokens,
        "max_model_len": SETTINGS.max_model_len,
    }
    context = CoreContext(layout=form, num_pages=SETTINGS.num_pages, **sizes)
    kv = KVManager(
        form, num_pages=SETTINGS.num_pages, max_num_seqs=SETTINGS.max_num_seqs,
        max_model_len=SETTINGS.max_model_len, evictor=LRU(context), enable_prefix_caching=False,
    )  # fmt: skip
    scheduler = Scheduler(kv=kv, policy=FCFS(context), speculation=speculation(SETTINGS), stages=stages, **sizes)
    executor = HoldingExecutor(worker, form, SETTINGS.max_num_seqs, SETTINGS.max_model_len, 0)
    ready = worker.begun() if isinstance(worker, Crew) else worker.start()
    return EngineCore(scheduler=scheduler, executor=executor, worker_ready=ready, in_flight=1 + stages)


def target() -> dict[tuple[int, ...], float]:
    """The probability of each output, from the model without cache, runner or drafts."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for tokens, probability in found.items():
            logits = dense_logits([*PROMPT, *tokens])[-1]
            values, ids = torch.topk(logits, TOP_K)
            for token, p in zip(ids.tolist(), torch.softmax(values, 0).tolist(), strict=True):
                longer[(*tokens, token)] = probability * p
        found = longer
    return found


@pytest.mark.parametrize(
    ("drafter", "options", "stages"),
    [
        ("guessing", {}, 1),
        ("model", {}, 1),
        ("knowing", {"kind": "right"}, 1),
        pytest.param("ngram", {"min_match": 1}, 1, marks=pytest.mark.slow),  # certain of its drafts, as "knowing" is
        ("guessing", {}, 2),
        pytest.param("model", {}, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("count", [1500, pytest.param(6000, marks=pytest.mark.slow)])
def test_outputs_have_the_targets_distribution(
    drafter: str, options: dict[str, object], stages: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square over whole outputs of four tokens, so that dependence between positions would show too."""
    expected = target()
    likely = sorted(expected, key=expected.__getitem__)[-3:]
    monkeypatch.setattr(drafters.KnowingBody, "truths", [[*PROMPT, *tokens] for tokens in likely])
    if drafter == "guessing":  # its guesses are rarely among three tokens of 61: let them be
        top = {token for tokens in expected for token in tokens}
        keep = torch.tensor([1.0 if token in top else 0.02 for token in range(VOCAB)])
        monkeypatch.setattr(drafters, "WEIGHTS", keep)
    core = make_core(drafter, options, stages)
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=PROMPT,
            params=SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=LENGTH, seed=i, ignore_eos=True),
        )
        for i in range(count)
    )
    outcomes = run_schedule(core, Schedule(settings=SETTINGS, requests=requests))
    observed: dict[tuple[int, ...], int] = {}
    for outcome in outcomes.values():
        assert tuple(outcome.tokens) in expected
        observed[tuple(outcome.tokens)] = observed.get(tuple(outcome.tokens), 0) + 1
    stats = core.stats()
    assert stats.num_drafts > count / 2 and stats.num_accepted_drafts > 100, stats
    # Rare outputs share a cell, as the statistic asks.
    cells: list[tuple[float, int]] = []
    rest = [0.0, 0]
    for tokens, p in expected.items():
        if p * count >= 5:
            cells.append((p * count, observed.get(tokens, 0)))
        else:
            rest[0] += p * count
            rest[1] += observed.get(tokens, 0)
    cells.append((rest[0], int(rest[1])))
    e, o = (np.array(column, float) for column in zip(*cells, strict=True))
    statistic, df = float(((o - e) ** 2 / e).sum()), len(cells) - 1
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))  # Wilson and Hilferty 1931
    assert z < 3.3, f"chi-square {statistic:.1f} with {df} degrees of freedom"
