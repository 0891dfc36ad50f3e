"""Train the bundled model from scratch: `python -m engine_tiny.train --run-dir DIR --max-minutes 105`.

Wall-clock decides: the learning rate falls to nothing as the minutes run out, whatever the machine's speed.
The state lies in the run directory and `--resume` goes on from it. What is trained is an `Objective`, and the
loop knows no more of it: a draft model or a head on the hidden states is another objective over the same
corpus, tokenizer and packing.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import spawn

from engine_tiny.corpus.chat import MIXES
from engine_tiny.layout import llama_config
from engine_tiny.packing import PackedBatch, PackingPlan, batches
from engine_tiny.probe import exact_rates
from engine_tiny.render import Encoder
from engine_tiny.tokenizer import VOCAB_SIZE, load_tokenizer, train_tokenizer

SEED = 20261121
SIZE = {"hidden_size": 256, "layers": 6, "heads": 4, "kv_heads": 2, "intermediate_size": 704}


class Objective(Protocol):
    """What the loop trains: parameters, a loss on a batch, and a word on how it is doing."""

    @property
    def module(self) -> torch.nn.Module: ...

    def loss(self, batch: PackedBatch) -> torch.Tensor: ...

    def report(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Settings:
    run_dir: Path
    max_minutes: float
    learning_rate: float = 4e-3
    warmup_steps: int = 100
    decay_from: float = 0.35
    save_minutes: float = 5.0
    report_minutes: float = 8.0


class LanguageModel:
    """Next-token prediction by a Llama, on the targets only."""

    def __init__(self, encoder: Encoder, *, compiled: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(SEED)
        config = LlamaConfig(
            **(llama_config(vocab_size=VOCAB_SIZE, **SIZE) | {"dtype": "float32", "torch_dtype": None})
        )
        self.module = LlamaForCausalLM(config)
        self._encoder = encoder
        self._loss = torch.compile(self._loss_of, dynamic=False) if compiled else self._loss_of

    def _loss_of(self, inputs: torch.Tensor, places: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.module.model(input_ids=inputs, use_cache=False).last_hidden_state
        logits = self.module.lm_head(hidden.flatten(0, 1)[places])
        return F.cross_entropy(logits.float(), labels, ignore_index=-100)

    def loss(self, batch: PackedBatch) -> torch.Tensor:
        """The vocabulary's matrix is a third of the work: only places whose next token counts go through it."""
        tokens = torch.from_numpy(batch.tokens.astype(np.int64))
        following = np.roll(batch.tokens, -1, axis=1).astype(np.int64).reshape(-1)
        wanted = np.roll(batch.targets, -1, axis=1)
        wanted[:, -1] = False
        places = np.flatnonzero(wanted.reshape(-1))[: tokens.numel() // 2]
        # Always the same number of places, so that the compiled step has one shape.
        padded = np.zeros(tokens.numel() // 2, dtype=np.int64)
        labels = np.full(tokens.numel() // 2, -100, dtype=np.int64)
        padded[: len(places)], labels[: len(places)] = places, following[places]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self._loss(tokens, torch.from_numpy(padded), torch.from_numpy(labels))

    def report(self) -> dict[str, float]:
        return exact_rates(self.module, self._encoder, 64)


def optimizers(module: torch.nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (it needs about half the tokens), AdamW for the rest."""
    matrices = [p for name, p in module.named_parameters() if p.ndim == 2 and "embed" not in name]
    inside = {id(p) for p in matrices}
    rest = [p for p in module.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Crew:
    """The ranks that train together: their gradients are averaged, and rank 0's clock is everyone's."""

    def __init__(self, rank: int, ranks: int, rendezvous: Path) -> None:
        self.rank = rank
        self.ranks = ranks
        if ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)

    def average(self, parameters: list[torch.nn.Parameter], loss: float, clock: float) -> tuple[float, float]:
        """Average the gradients in place. Returns the mean loss and rank 0's clock.

        With one clock for all, all have the same learning rate and stay the same to the last bit.
        """
        if self.ranks == 1:
            return loss, clock
        notes = torch.tensor([loss / self.ranks, clock if self.rank == 0 else 0.0])
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([notes, *(g.flatten() / self.ranks for g in gradients)])
        dist.all_reduce(flat)
        at = 2
        for gradient in gradients:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            at += gradient.numel()
        return float(flat[0]), float(flat[1])


def _save(path: Path, state: dict[str, Any]) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def train(objective: Objective, plan: PackingPlan, settings: Settings, crew: Crew, *, resume: bool) -> None:
    """The loop. Leaves `state.pt` in the run directory: after each few minutes, and at the end."""
    path = settings.run_dir / "state.pt"
    steppers = optimizers(objective.module, settings.learning_rate)
    step, shard, place, spent, seen = 0, 0, -1, 0.0, 0
    if resume and path.exists():
        state = torch.load(path, weights_only=False)
        objective.module.load_state_dict(state["module"])
        for stepper, saved in zip(steppers, state["steppers"], strict=True):
            stepper.load_state_dict(saved)
        step, shard, place, spent, seen = (state[k] for k in ("step", "shard", "place", "spent", "seen"))
    parameters = list(objective.module.parameters())
    budget = settings.max_minutes * 60.0
    began = time.monotonic() - spent
    saved_at = reported_at = logged_at = time.monotonic()
    logged_seen, running = seen, []
    for position in batches(plan, shard, place + 1, rank=crew.rank, ranks=crew.ranks):
        shard, place, batch = position
        loss = objective.loss(batch)
        loss.backward()
        mean_loss, spent = crew.average(parameters, loss.item(), time.monotonic() - began)
        left = 1.0 - spent / budget
        rate = max(0.0, min(1.0, (step + 1) / settings.warmup_steps, left / (1.0 - settings.decay_from)))
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = settings.learning_rate * rate
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        step, seen, over = step + 1, seen + crew.ranks * batch.tokens.size, left <= 0.0
        if crew.rank == 0:
            running.append(mean_loss)
            now = time.monotonic()
            if step % 50 == 0:
                speed = (seen - logged_seen) / (now - logged_at)
                print(
                    f"step {step} minutes {spent / 60:.1f} tokens {seen / 1e6:.2f}M ({speed:.0f}/s) "
                    f"loss {np.mean(running):.4f} rate {rate:.3f}",
                    flush=True,
                )
                running.clear()
                logged_at, logged_seen = now, seen
            if over or now - saved_at > settings.save_minutes * 60:
                steppers_state = [stepper.state_dict() for stepper in steppers]
                position_state = {"step": step, "shard": shard, "place": place, "spent": spent, "seen": seen}
                _save(path, {"module": objective.module.state_dict(), "steppers": steppers_state} | position_state)
                saved_at = now
            if over or now - reported_at > settings.report_minutes * 60:
                report = {kind: round(share, 3) for kind, share in objective.report().items()}
                print(f"step {step} held out: {json.dumps(report)}", flush=True)
                reported_at = time.monotonic()
        if over:
            return


def _run(rank: int, options: argparse.Namespace) -> None:
    """One rank: a process with few threads keeps its pace on a machine that others use too."""
    torch.set_num_threads(options.threads)
    crew = Crew(rank, options.ranks, options.run_dir / "rendezvous")
    encoder = Encoder(load_tokenizer(options.run_dir))
    objective = LanguageModel(encoder, compiled=not options.no_compile)
    settings = Settings(
        options.run_dir, options.max_minutes, options.learning_rate, report_minutes=options.report_minutes
    )
    if rank == 0:
        print(f"{sum(p.numel() for p in objective.module.parameters()) / 1e6:.2f} M parameters", flush=True)
    plan = PackingPlan(options.run_dir, options.seed, tokens_per_batch=8192 // options.ranks, mix=options.mix)
    train(objective, plan, settings, crew, resume=options.resume)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--max-minutes", type=float, default=105.0)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--ranks", type=int, default=4, help="processes, each with its part of every batch")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--mix", choices=sorted(MIXES), default="general")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--report-minutes", type=float, default=12.0)
    options = parser.parse_args()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    if not (options.run_dir / "tokenizer.json").exists():
        train_tokenizer(options.seed).save(str(options.run_dir / "tokenizer.json"))
    (options.run_dir / "rendezvous").unlink(missing_ok=True)
    spawn(_run, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
