"""Documents packed whole into windows, by the shard, in a process beside the trainer.

No document is cut when it would fit: a conversation without its beginning has nothing to copy from.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine_tiny.corpus import chat
from engine_tiny.corpus.base import Split
from engine_tiny.layout import EOS, TOKEN_IDS
from engine_tiny.render import Encoder
from engine_tiny.tokenizer import load_tokenizer

POOL = 48
"""So many documents lie open at a time; each window takes the longest that still fit."""


@dataclass(frozen=True)
class PackedBatch:
    """`targets[row, i]` says that token i is to be predicted (from the tokens before it)."""

    tokens: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class PackingPlan:
    """How one shard is cut: every `long_every`-th batch has long windows, all have the same number of tokens."""

    tokenizer_folder: Path
    seed: int
    window: int = 512
    long_window: int = 2048
    tokens_per_batch: int = 8192
    batches_per_shard: int = 60
    long_every: int = 10
    mix: str = "general"


def windows(
    encoder: Encoder, seed: int, split: Split, window: int, *, long: bool, mix: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """An endless stream of packed windows."""
    source = chat.documents(seed, split, long=long, mix=mix)
    pool: list[tuple[list[int], np.ndarray]] = []
    while True:
        while len(pool) < POOL:
            ids, targets = encoder.document(next(source))
            pool.append((ids[:window], targets[:window]))
        tokens = np.full(window, TOKEN_IDS[EOS], dtype=np.uint16)
        wanted = np.zeros(window, dtype=bool)
        used = 0
        fitting = [0]  # the oldest goes first, so that none waits for ever
        while fitting:
            ids, targets = pool.pop(fitting[0])
            tokens[used : used + len(ids)] = ids
            wanted[used : used + len(ids)] = targets
            used += len(ids)
            fits = [i for i, (ids, _) in enumerate(pool) if len(ids) <= window - used]
            fitting = [max(fits, key=lambda i: len(pool[i][0]))] if fits and window - used < window // 3 else fits[:1]
        yield tokens, wanted


def make_shard(plan: PackingPlan, index: int, split: Split = "train") -> list[PackedBatch]:
    """The same for the same plan and index, whoever asks: training resumes by the index alone."""
    encoder = Encoder(load_tokenizer(plan.tokenizer_folder))
    seed = plan.seed * 1_000_003 + index
    short = windows(encoder, seed, split, plan.window, long=False, mix=plan.mix)
    extended = windows(encoder, seed, split, plan.long_window, long=True, mix=plan.mix)
    batches = []
    for number in range(plan.batches_per_shard):
        long = number % plan.long_every == plan.long_every - 1
        rows = plan.tokens_per_batch // (plan.long_window if long else plan.window)
        drawn = [next(extended if long else short) for _ in range(rows)]
        batches.append(PackedBatch(np.stack([t for t, _ in drawn]), np.stack([w for _, w in drawn])))
    return batches


def batches(
    plan: PackingPlan, first_shard: int, skip: int = 0, *, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[int, int, PackedBatch]]:
    """(shard, place in it, batch) for ever; one process makes the next shard while this one is used.

    Each rank has shards of its own; the places of long batches are the same for all, so that none waits.
    """
    with ProcessPoolExecutor(1) as pool:
        coming: Future[list[PackedBatch]] = pool.submit(make_shard, plan, first_shard * ranks + rank)
        shard = first_shard
        while True:
            current = coming.result()
            coming = pool.submit(make_shard, plan, (shard + 1) * ranks + rank)
            for place, batch in enumerate(current):
                if shard > first_shard or place >= skip:
                    yield shard, place, batch
            shard += 1
