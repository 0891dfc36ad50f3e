"""Engines of the bundled model with drafters of this package, small and in float64, and heads of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plain
import published
import pytest
import torch
from published import Sizes

pytest.importorskip("engine_tiny", reason="engine-tiny is not installed")

from engine import LLM, SamplingParams
from engine.interfaces.model import State
from engine.types.errors import EngineError
from engine_tiny import model_folder

TINY = Sizes(vocab=4096, hidden=256, heads=4, kv_heads=2, size=64, inner=96)
SETTINGS: dict[str, Any] = {
    "dtype": "float64", "max_num_seqs": 3, "max_num_batched_tokens": 12, "block_size": 4, "max_model_len": 64,
    "num_kv_pages": 18,
}  # fmt: skip
TEXTS = ["Once upon a time there was a cat", "Once upon a time", "one two three one two", "The sea"]


def params(number: int) -> SamplingParams:
    """Greedy and sampled; with penalties, and a logit that is forbidden."""
    return SamplingParams(
        temperature=(0.0, 0.9)[number % 2], seed=number, max_tokens=26, ignore_eos=True,
        repetition_penalty=(1.0, 1.2)[number // 2], logprobs=2 if number == 1 else None,
    )  # fmt: skip


def of_drafter(**options: Any) -> dict[str, Any]:
    """The settings of a drafter's options."""
    return {f"drafter.{name}": value for name, value in options.items()}


def tokens(**settings: Any) -> list[list[int]]:
    """Of each text, in an engine with these settings."""
    with LLM(**SETTINGS | settings) as llm:
        outputs = llm.generate(TEXTS, [params(i) for i in range(len(TEXTS))], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def head(kind: str, folder: Path, **more: Any) -> Path:
    """A head for the bundled model."""
    layer = TINY.layer()
    if kind == "medusa":
        return published.write(folder, {"medusa_num_heads": 3, **more}, published.medusa(of=TINY), "medusa_lm_head.pt")
    if kind == "eagle":
        config = {**layer, "architectures": ["LlamaForCausalLM"], **more}
        return published.write(folder, config, published.eagle(of=TINY), "pytorch_model.bin")
    config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 500, **more}
    return published.write(folder, config, published.eagle3(of=TINY, drafted=500))


def states(ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(final states, streams behind each layer) of the bundled model, computed at once in float64."""
    model, streams = plain.open_model(model_folder(), torch.float64), []

    def walk(layers: Any, state: Any) -> Iterator[Any]:
        for layer in layers:
            yield layer
            streams.append(state["hidden"] + state["residual"])

    state = State(token_ids=torch.tensor(ids, dtype=torch.int32), positions=torch.arange(len(ids)))
    return model.forward(state, walk), streams


def refused(driver: str, said: str, **options: Any) -> None:
    """The engine does not start with this drafter."""
    with pytest.raises(EngineError, match=said):
        LLM(**SETTINGS, drafter=driver, **of_drafter(**options))
