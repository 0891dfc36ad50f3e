"""Which tree of drafts suits Medusa's heads: the paths that are right most often on texts."""

from collections import Counter
from collections.abc import Iterable

import torch

from engine_drafters.train.loop import walked
from engine_drafters.train.medusa import MedusaTraining
from engine_drafters.train.target import Batch
from engine_drafters.tree import MOST_NODES, ordered


@torch.no_grad()
def right_paths(objective: MedusaTraining, batch: Batch) -> list[tuple[int, ...]]:
    """For each root the path of choices that says what the target says, up to where it speaks no more, or where a head
    has that token behind `MOST_NODES` others."""
    paths: list[list[int]] = [[] for _ in batch.row]
    for step, logits in enumerate(objective.logits(batch)):
        roots = torch.nonzero(batch.drafted > step).flatten()
        said = batch.behind(batch.tokens, 2 + step)[roots]
        choices = (logits > logits.gather(1, said.unsqueeze(1))).sum(1)
        for root, choice in zip(roots.tolist(), choices.tolist(), strict=True):
            if len(paths[root]) == step and choice < MOST_NODES:
                paths[root].append(choice)
    return [tuple(path) for path in paths]


def grown(paths: Iterable[tuple[int, ...]], heads: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The chain of all heads, and then what is right most often: a path is never more often so than its parent."""
    counts = Counter(path[:n] for path in paths for n in range(1, len(path) + 1))
    tree = dict.fromkeys((0,) * n for n in range(1, heads + 1))
    for path in sorted(counts, key=lambda path: (-counts[path], len(path), path)):
        if len(tree) < size:
            tree[path] = None
    return ordered(list(tree))


def tokens_per_step(objective: MedusaTraining, batches: Iterable[Batch], tree: tuple[tuple[int, ...], ...]) -> float:
    """As `engine_drafters.train.loop.Acceptance` has it, with this tree."""
    nodes, steps, said = set(tree), 0, 0
    for batch in batches:
        paths = right_paths(objective, batch)
        lengths = [next(n for n in range(len(path), -1, -1) if not n or path[:n] in nodes) for path in paths]
        for accepted, drafted in walked(batch, torch.tensor(lengths)):
            steps += 1
            said += min(accepted + 1, drafted)
    return said / max(1, steps)
