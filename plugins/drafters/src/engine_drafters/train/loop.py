"""The training loop, and how many drafts of what it made would be accepted."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine_drafters.train.target import Batch
from engine_tiny.train import optimizers


class Objective(Protocol):
    """What is trained."""

    @property
    def module(self) -> torch.nn.Module: ...

    def loss(self, batch: Batch) -> torch.Tensor: ...

    def tokens(self, batch: Batch) -> list[torch.Tensor]:
        """The likeliest draft of each step at the roots that have one, in the target's ids: [n] each."""
        ...


class Acceptance(NamedTuple):
    """Of greedy drafts beside greedy decoding.

    Args:
        by_step: of the drafts whose forerunners were right, the share that is right.
        tokens_per_step: that the target's step gives in the mean, its own token counted, with as many drafts.
    """

    by_step: list[float]
    tokens_per_step: float

    def __str__(self) -> str:
        shares = ", ".join(f"{100 * share:.1f}" for share in self.by_step)
        return f"accepted by place {shares} %, {self.tokens_per_step:.2f} tokens a step"


@torch.no_grad()
def measure(objective: Objective, batches: Iterable[Batch]) -> Acceptance:
    """Decode the texts again, as it were: with the text's own tokens as the target's, drafts are right where they
    equal them, and the next step begins behind the last right one."""
    tried, right, steps, said = [0] * 64, [0] * 64, 0, 0
    for batch in batches:
        lengths, alive = torch.zeros_like(batch.drafted), torch.ones_like(batch.drafted, dtype=torch.bool)
        drafts = objective.tokens(batch)
        for step, tokens in enumerate(drafts):
            exists = batch.drafted > step
            equal = torch.zeros_like(alive)
            equal[exists] = tokens == batch.behind(batch.tokens, 2 + step)[exists]
            alive &= equal
            lengths += alive
        for accepted, drafted in walked(batch, lengths):
            for step in range(min(accepted + 1, drafted, len(drafts))):
                tried[step] += 1
                right[step] += step < accepted
            steps += 1
            said += min(accepted + 1, drafted)
    return Acceptance([r / t for r, t in zip(right, tried, strict=True) if t], said / max(1, steps))


def walked(batch: Batch, lengths: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(accepted, of so many that could be) at the roots where decoding has a step.

    lengths: int64 [N]; how many drafts are accepted at each root.
    """
    row, next_root = -1, 0
    for at, root, accepted, drafted in torch.stack([batch.row, batch.root, lengths, batch.drafted], dim=1).tolist():
        if at != row or root >= next_root:
            row, next_root = at, root + accepted + 1
            yield accepted, drafted


def train(
    objective: Objective,
    batches: Iterator[Batch],
    minutes: float,
    *,
    learning_rate: float = 3e-3,
    warmup_steps: int = 20,
    decay_from: float = 0.35,
    report: Callable[[], str] = str,
    report_minutes: float = 10.0,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> None:
    """For so many minutes: the learning rate falls to nothing as they run out, whatever the machine's speed."""
    steppers = optimizers(objective.module, learning_rate)
    parameters = [p for p in objective.module.parameters() if p.requires_grad]
    began = reported = time.monotonic()
    losses: list[float] = []
    seen = step = 0
    while (spent := (time.monotonic() - began) / (60 * minutes)) < 1.0:
        batch = next(batches)
        loss = objective.loss(batch)
        loss.backward()
        rate = min(1.0, (step + 1) / warmup_steps, (1.0 - spent) / (1.0 - decay_from))
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = learning_rate * rate
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step += 1
        seen += batch.tokens.numel()
        if step % 25 == 0:
            say(f"step {step} minutes {spent * minutes:.1f} tokens {seen / 1e6:.2f}M loss {np.mean(losses[-25:]):.4f}")
        if time.monotonic() - reported > 60 * report_minutes:
            say(f"step {step} {report()}")
            reported = time.monotonic()
    say(f"step {step} minutes {minutes:.1f} tokens {seen / 1e6:.2f}M, done")


def chosen_tokens(spoken: Sequence[np.ndarray], vocab_size: int, count: int) -> torch.Tensor:
    """int64 [count], ascending: the tokens that the target says most often."""
    counts = np.bincount(np.concatenate(spoken), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))
