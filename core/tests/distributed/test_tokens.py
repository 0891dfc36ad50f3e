"""Several ranks give one rank's tokens: in float64, greedy and sampled, over the architectures, whatever is special in
how they divide. Ranks are threads with the real workers and communicators, with steps in flight."""

from __future__ import annotations

import gc
import json
import threading
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE
from safetensors.torch import load_file, save_file
from thread_ranks import registry

from engine import SamplingParams
from engine.config.settings import EngineConfig
from engine.llm import LLMEngine
from engine.modeling import Decoder
from engine.runner import assemble as assemble_module
from engine.runner import worker as worker_module
from engine.types.errors import ContractError, EngineError, UnsupportedModelError
from engine.types.start import WorkerStart
from engine_kit.dispatch_guard import DispatchGuard
from engine_reference.models import llama

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one KV head, biases of every projection": ("LlamaForCausalLM", {"kv_heads": 1, "bias": True}),
    "two KV heads, tied, several files": ("LlamaForCausalLM", {"kv_heads": 2, "tie": True, "shards": 3}),
    "sliding everywhere": ("MistralForCausalLM", {"kv_heads": 4, "sliding": 7}),
    "full and sliding layers, q, k and v biases": ("Qwen2ForCausalLM", {"sliding": 6, "tie": True}),
    "latents whole on every rank": ("DeepseekV3ForCausalLM", {"rope": "yarn-mscale", "bias": True}),
    "norms of queries and keys": ("Qwen3ForCausalLM", {"bias": True, "head_dim": 48}),
}
TENSOR_QUICK = (
    "one KV head, biases of every projection",
    "two KV heads, tied, several files",
    "full and sliding layers, q, k and v biases",
    "latents whole on every rank",
)
"""What divides in ways of its own: the others are left to `make test-all`. Norms of queries and keys are divided in
`test_sharded_models_pass_the_dispatch_guard` too."""
STAGES_QUICK = TENSOR_QUICK[1:]
"""Stages do not look into layers: tied weights, tables and forms of the cache are what differs."""
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 1.1, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.3, "seed": 7},
    {"temperature": 0.0, "logprobs": 4, "min_tokens": 6},
    {"temperature": 1.0, "seed": 11, "logprobs": 2, "frequency_penalty": 0.5},
)


def generate(folder: Path, size: int, **settings: Any) -> list[tuple[list[int], list[Any]]]:
    """Five requests at once, prompts in chunks: each one's tokens, and the chosen tokens' log probabilities."""
    fields = {
        "model": str(folder), "dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 40,
        "block_size": 4, "tensor_parallel_size": size, **settings,
    }  # fmt: skip
    engine = LLMEngine.from_engine_args(EngineConfig(**fields), registry())
    try:
        for index, fields in enumerate(PARAMS):
            ids = np.random.default_rng(index).integers(0, 256, 5 + 9 * index).tolist()
            params = SamplingParams(max_tokens=14, ignore_eos=True, **fields)
            engine.add_request(str(index), {"prompt_token_ids": ids}, params)
        found: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            found.update({output.request_id: output.outputs[0] for output in engine.step()})
        if "executor" in settings:
            assert (engine.client.core.executor.overlaps > 5) == (settings.get("in_flight") != 1)  # type: ignore[attr-defined]
        outputs = [found[str(index)] for index in range(len(PARAMS))]
        return [
            (
                list(output.token_ids),
                [entry[t].logprob for t, entry in zip(output.token_ids, output.logprobs or (), strict=False)],
            )
            for output in outputs
        ]
    finally:
        engine.shutdown()


def models(quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(found, expected, strict=True):
        assert len(tokens) == 14 and tokens == other_tokens
        np.testing.assert_allclose(logprobs, other_logprobs, atol=1e-6)


@pytest.mark.parametrize("name", models(TENSOR_QUICK))
def test_two_and_four_ranks_give_one_ranks_tokens(checkpoints, name: str) -> None:
    architecture, features = MODELS[name]
    folder = checkpoints(architecture, **features)
    expected = generate(folder, 1)
    for size in (2, 4):
        assert_equal(generate(folder, size, executor="threads"), expected)


@pytest.mark.parametrize("name", models(STAGES_QUICK))
def test_stages_give_one_ranks_tokens(checkpoints, name: str) -> None:
    """Of uneven layers, alone and with ranks that share them; each stage loads and keeps what its own layers need."""
    architecture, features = MODELS[name]
    folder = checkpoints(architecture, **features, layers=4)
    expected = generate(folder, 1)
    sent_ahead = {"pipeline_parallel_size": 3, "communicator": "gloo"}
    for stages in (sent_ahead, {"pipeline_parallel_size": 2, "pipeline_parallel_split": "3,1"}):
        assert_equal(generate(folder, 1, executor="threads", **stages), expected)
    assert_equal(generate(folder, 2, executor="threads", pipeline_parallel_size=2), expected)


def test_the_profile_of_a_stage_waits_for_a_later_one(checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first stage's largest step leaves still arrives where the next stage has been slow to load."""
    profile, gone = worker_module._profile, threading.Event()

    def profiled(start: WorkerStart, parts: Any) -> Any:
        if start.place.stage.last:
            gone.wait(1)
        try:
            return profile(start, parts)
        finally:
            gc.collect()
            gone.set()

    folder = checkpoints("LlamaForCausalLM", layers=4)
    expected = generate(folder, 1)
    monkeypatch.setattr(worker_module, "_profile", profiled)
    settings = {"pipeline_parallel_size": 2, "num_kv_pages": None, "communicator": "gloo"}
    assert_equal(generate(folder, 1, executor="threads", **settings), expected)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size=5; the model has 4 layers"),
        ({"pipeline_parallel_size": 2, "pipeline_parallel_split": "3,2"}, "split=3,2; the model has 4 layers"),
        ({"pipeline_parallel_split": "3,1"}, "size=1 with pipeline_parallel_split=3,1; the model has 4 layers"),
        ({"pipeline_parallel_size": 2, "executor": "inline"}, "it runs one worker, 2 are needed"),
        ({"pipeline_parallel_size": 2, "pipeline_parallel_split": "3,x"}, "send one of each stage, like 6,10"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "it has no routed experts"),
    ],
)
def test_divisions_that_cannot_be_are_refused_at_start(checkpoints, settings: dict[str, Any], says: str) -> None:
    from engine.frontend.launch import launch

    with pytest.raises(EngineError, match=says):
        launch(EngineConfig(model=str(checkpoints("LlamaForCausalLM", layers=4)), **settings))


def test_a_model_whose_layers_are_no_stack_is_refused(checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints("LlamaForCausalLM", layers=4)
    monkeypatch.setattr(llama, "Stack", lambda context, count, make: [make(context, index) for index in range(count)])
    with pytest.raises(ContractError, match="this worker's stage does not have it"):
        generate(folder, 1, executor="threads", pipeline_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("features", [{"in_flight": 1}, {"num_kv_pages": 18}, {"max_num_batched_tokens": 5}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_under_other_schedules(checkpoints, name: str, features: dict[str, Any]) -> None:
    """No overlap; pages so few that requests are preempted; small chunks."""
    architecture, shape = MODELS[name]
    folder = checkpoints(architecture, **shape)
    expected = generate(folder, 1)
    for size in (2, 4):
        assert_equal(generate(folder, size, executor="threads", **features), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_does_not_divide(checkpoints, tmp_path: Path, tied: bool) -> None:
    """Ranks hold unequal parts of it: 275 rows are 69, 69, 69 and 68."""
    folder = checkpoints("LlamaForCausalLM", tie=tied)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCAB_SIZE + 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = torch.cat((tensors[name], torch.randn(3, tensors[name].shape[1])))
    save_file(tensors, tmp_path / "model.safetensors")
    expected = generate(tmp_path, 1)
    for size in (2, 4):
        assert_equal(generate(tmp_path, size, executor="threads"), expected)


def test_sharded_models_pass_the_dispatch_guard(checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between ops, attention and collectives there are only views."""
    folder = checkpoints("Qwen3ForCausalLM", bias=True, head_dim=48)
    expected = generate(folder, 1)
    context, guards = assemble_module.ModelContext, []

    def guarded(**fields: Any) -> Any:
        guards.append(DispatchGuard())
        return guards[-1].context(context(**fields))

    monkeypatch.setattr(assemble_module, "ModelContext", guarded)
    for name in ("forward", "logits"):

        def under_guard(self: Any, plain: Any, *args: Any) -> Any:
            with self.context.ops._guard:
                return plain(self, *args)

        monkeypatch.setattr(Decoder, name, partialmethod(under_guard, getattr(Decoder, name)))
    assert_equal(generate(folder, 2, executor="threads"), expected)
    assert len(guards) == 2


@pytest.mark.parametrize(
    ("size", "features", "reasons"),
    [
        (3, {}, ("num_attention_heads 4", "intermediate_size 80", "2 KV heads")),
        (8, {"heads": 16, "kv_heads": 16}, ()),
        (4, {"heads": 12, "kv_heads": 3}, ("3 KV heads can be neither divided",)),
    ],
)
def test_what_does_not_divide_is_refused_at_start(
    checkpoints, size: int, features: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    """By the launcher, before anything is built: every reason in one error."""
    from engine.frontend.launch import launch

    config = EngineConfig(model=str(checkpoints("LlamaForCausalLM", **features)), tensor_parallel_size=size)
    if not reasons:
        start = launch(config).start.worker
        assert (start.parallel.tp, start.layout.groups[0].num_kv_heads) == (8, 2)
        return
    with pytest.raises(UnsupportedModelError) as caught:
        launch(config)
    for reason in reasons:
        assert reason in str(caught.value)
