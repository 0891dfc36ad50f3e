"""A toy adapter of rank 1 on every linear layer, against weights into which it is merged, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import body_of, describe, make_context, plain_walk, run

from engine.interfaces.model import State
from engine.types.parallel import Stage
from engine_kit.safetensors_files import read_safetensors
from engine_sdk.conformance.model.ranks import on_ranks
from engine_sdk.toy_adapter import ToyAdapters
from engine_sdk.toy_adapter import merged as merged_into

IDS = [5, 17, 40, 8, 99]
NEAR = 1e-9


def merged(folder: Path) -> dict[str, torch.Tensor]:
    return merged_into(read_safetensors(describe(folder)[1]))


def model(folder: Path, tensors: Any = None, **context: Any) -> Any:
    description, weights, card = describe(folder)
    made = body_of(card)(make_context(description, torch.float64, **context))
    made.load_weights(read_safetensors(weights) if tensors is None else tensors.items())
    return made


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_it_is_what_merged_weights_are(checkpoints, architecture: str) -> None:
    folder = checkpoints(architecture)
    adapters = ToyAdapters()
    found = run(model(folder, adapters=adapters), IDS)
    whole = merged(folder)
    if architecture.startswith("Deepseek"):  # whose W_UK and W_UV are no layers, and are not adapted
        plain = dict(read_safetensors(describe(folder)[1]))
        whole |= {name: plain[name].double() for name in whole if "kv_b_proj" in name}
    torch.testing.assert_close(found, run(model(folder, whole), IDS), rtol=NEAR, atol=NEAR)
    assert not torch.allclose(found, run(model(folder), IDS), atol=1e-3)
    assert len(set(adapters.asked)) == len(adapters.asked)


def test_over_two_ranks(checkpoints) -> None:
    """What a rank adds is its part: of the outputs, or of the sum over inputs."""
    folder = checkpoints("LlamaForCausalLM", bias=True)
    expected = run(model(folder, merged(folder)), IDS)
    for found in on_ranks(
        2,
        lambda group: run(
            model(folder, adapters=ToyAdapters(), tp_rank=group.rank, tp_size=group.size, group=group), IDS
        ),
    ):
        torch.testing.assert_close(found, expected, rtol=NEAR, atol=NEAR)


def test_over_two_stages(checkpoints) -> None:
    """Each asks for its own layers alone."""
    folder = checkpoints("LlamaForCausalLM")
    layers = describe(folder)[0].num_layers
    state = State(token_ids=torch.tensor(IDS, dtype=torch.int32), positions=torch.arange(len(IDS)))
    asked: list[str] = []
    for stage in (Stage(index=0, count=2, stop=1), Stage(index=1, count=2, start=1)):
        adapters = ToyAdapters()
        part = model(folder, adapters=adapters, stage=stage)
        hidden = part.forward(state, plain_walk)
        own = {f"model.layers.{index}." for index in stage.layers(layers)}
        assert all(any(name.startswith(prefix) for prefix in own) for name in adapters.asked if name != "lm_head")
        asked += [name for name in adapters.asked if name != "lm_head"]
    torch.testing.assert_close(part.logits(hidden), run(model(folder, merged(folder)), IDS), rtol=NEAR, atol=NEAR)
    assert len(asked) == len(set(asked)) == 7 * layers
