"""Random checkpoints, and engines over them: the JAX worker beside the torch engine, and beside transformers."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from engine import LLM, SamplingParams
from engine.types.plan import StepPlan
from engine_sdk.conformance.model.small import quiet, small_config

VOCAB_SIZE = 99
CACHE = os.path.join(tempfile.gettempdir(), "engine-tpu-tests")
"""Where compiled steps are kept from run to run."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_kv_pages": 40,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
}
"""Few buckets, and fewer pages than many requests need."""


class Checkpoints:
    """Makes checkpoints on demand, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def __call__(self, architecture: str, **over: Any) -> Path:
        """The folder of a checkpoint whose config has `over` beside the suite's own."""
        key = repr((architecture, sorted(over.items())))
        if key not in self._made:
            self._made[key] = self._folder / f"model-{len(self._made)}"
            save(self._made[key], architecture, over)
        return self._made[key]


def save(folder: Path, architecture: str, over: dict[str, Any]) -> None:
    """Write a random checkpoint; wide enough weights that greedy tokens follow from the mathematics."""
    sizes = {"initializer_range": 0.2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 128}
    config = small_config(architecture, sizes | over)
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    with quiet(), torch.no_grad():
        model = kind(kind.config_class(**config)).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts biases at 0 and norms at 1, where a mistake would not show
                parameter.normal_(std=0.2)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
        model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def jax_engine(
    model: Path | str,
    platform: dict[str, Any] | None = None,
    more_options: dict[str, dict[str, Any]] | None = None,
    **settings: Any,
) -> LLM:
    """An engine whose worker is the JAX one, on the processor. more_options: of other points' drivers."""
    options = {"device": "cpu", "cache_dir": CACHE, "tokens": "16,32", "rows": "1,4"} | (platform or {})
    given = {"platform": options} | (more_options or {})
    return LLM(str(model), platform="tpu", options=given, **(SETTINGS | settings))


def torch_engine(model: Path | str, **settings: Any) -> LLM:
    """One on the reference drivers."""
    return LLM(str(model), platform="host", ops="torch", attention="torch", **(SETTINGS | settings))


def tokens_of(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """The output of each prompt."""
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(one.outputs[0].token_ids) for one in llm.generate(given, list(params), use_tqdm=False)]


def worker_of(llm: LLM) -> Any:
    """The worker inside an engine that runs in this process."""
    return llm.llm_engine.client.core.executor._worker  # type: ignore[attr-defined]


@dataclass
class Launched:
    """What a step's launch took.

    Args:
        sent: copies to the device. waits: calls that wait for it.
    """

    plan: StepPlan
    sent: int = 0
    waits: int = 0


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """The steps that an engine launches from now on; what is sent but not asked to be is an error."""
    runner, steps, inside = worker_of(llm)._runner, list[Launched](), list[Launched]()
    thread = threading.get_ident()
    send, execute = runner._steps.send, runner.execute

    def sends(*args: Any) -> jax.Array:
        for one in inside:
            one.sent += 1
        found: jax.Array = send(*args)
        return found

    monkeypatch.setattr(runner._steps, "send", sends)

    def watch(owner: Any, name: str, wrap: Any = lambda function: function) -> None:
        """Count calls inside of a step's launch, with an array of JAX's: each waits for the device."""
        plain = getattr(owner, name).fget if wrap is property else getattr(owner, name)

        def seen(array: Any, *args: Any, **kwargs: Any) -> Any:
            for one in inside:
                one.waits += isinstance(array, jax.Array) and threading.get_ident() == thread
            return plain(array, *args, **kwargs)

        monkeypatch.setattr(owner, name, wrap(seen))

    watch(type(jax.numpy.zeros(1)), "block_until_ready")
    watch(type(jax.numpy.zeros(1)), "_value", property)
    watch(np, "asarray")
    watch(np, "array")

    def counted(plan: StepPlan) -> Any:
        inside.append(Launched(plan))
        with jax.transfer_guard_host_to_device("disallow"):
            future = execute(plan)
        steps.append(inside.pop())
        return future

    monkeypatch.setattr(runner, "execute", counted)
    return steps
