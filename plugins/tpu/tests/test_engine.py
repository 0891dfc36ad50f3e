"""The whole engine on the JAX worker: beside transformers, beside the torch engine, and what a step costs the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax_engines import CACHE, VOCAB_SIZE, jax_engine, tokens_of, torch_engine, watched, worker_of

from engine import SamplingParams
from engine.types.errors import CheckpointError, ConfigError, EngineError, InvalidRequestError, KVCacheTooSmallError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_tpu import attention_pallas
from engine_tpu.buckets import Buckets

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "MistralForCausalLM": {"sliding_window": 5},
    "Qwen2ForCausalLM": {
        "use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    "Qwen3ForCausalLM": {"head_dim": 16, "attention_bias": True},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 10, "sliding_window": 5},
    "Gemma3ForCausalLM": {
        "query_pre_attn_scalar": 10, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    },
    "MixtralForCausalLM": {"sliding_window": 5},
    "Qwen3MoeForCausalLM": {"mlp_only_layers": [0], "norm_topk_prob": True},
}  # fmt: skip
PROMPTS = (19, 5, 33, 1, 40, 16)
"""Lengths of the prompts; beside and across the blocks of 8, and longer than a step's budget."""


def prompts_of(number: int, lengths: tuple[int, ...] = PROMPTS) -> list[list[int]]:
    """Random prompts of these lengths; the first two begin alike."""
    rng = np.random.default_rng(number)
    made = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in lengths]
    made[1][: min(map(len, made[:2]))] = made[0][: len(made[1])]
    return made


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, checkpoints: Any) -> Any:
    """A checkpoint, and both engines over it."""
    folder = checkpoints(request.param, **MODELS[request.param])
    with jax_engine(folder) as mine, torch_engine(folder) as other:
        yield folder, mine, other


@pytest.mark.slow
def test_greedy_as_transformers(pair: Any) -> None:
    """Token by token, but where the oracle's two best logits are within 1e-4."""
    folder, mine, _ = pair
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts, new = prompts_of(0), 8
    found = tokens_of(mine, prompts, [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)] * len(prompts))
    for prompt, tokens in zip(prompts, found, strict=True):
        given = torch.tensor([prompt])
        with torch.no_grad():
            logits = model(torch.cat((given, torch.tensor([tokens])), dim=1)).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for token, row, (first, second) in zip(tokens, logits, best.tolist(), strict=True):
            assert token == int(row.argmax()) or first - second < 1e-4


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "top_k": st.sampled_from([0, 5]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": st.integers(1, 24),
        "min_tokens": st.sampled_from([0, 1]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "prompt_logprobs": st.sampled_from([None, None, 2]),
        "ignore_eos": st.booleans(),
    }
)


@pytest.mark.slow
def test_as_the_torch_engine(pair: Any) -> None:
    """Any requests, in batches that preempt each other and find each other's prefixes: equal tokens for equal seeds,
    and log probabilities within 1e-3."""
    _, mine, other = pair

    @given(st.lists(st.tuples(st.integers(1, 45), PARAMS), min_size=2, max_size=9), st.integers(0, 9))
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    def run(requests: list[tuple[int, dict[str, Any]]], number: int) -> None:
        prompts = prompts_of(number, tuple(length for length, _ in requests))
        params = [SamplingParams(**one) for _, one in requests]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        found, wanted = (llm.generate(given, params, use_tqdm=False) for llm in (mine, other))
        for a, b in zip(found, wanted, strict=True):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
            assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
            for mine_at, other_at in zip(a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=True):
                _near(mine_at, other_at)
            assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)
            for mine_at, other_at in zip((a.prompt_logprobs or ())[1:], (b.prompt_logprobs or ())[1:], strict=True):
                _near(mine_at, other_at)

    run()
    assert worker_of(mine)._runner._steps.compiled.met <= 2, "only prompt logprobs are compiled when they are met"


def _near(mine: Any, other: Any) -> None:
    # Of near candidates either may stand in the last place.
    assert len(set(mine) & set(other)) >= len(other) - 1
    for token in set(mine) & set(other):
        assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)


@pytest.mark.slow
def test_float64_in_any_batch(checkpoints: Any) -> None:
    """In float64 a request's tokens are the same alone, in any batch, in other buckets, and as the torch engine's."""
    folder = checkpoints("Qwen3ForCausalLM", **MODELS["Qwen3ForCausalLM"])
    prompts = prompts_of(3)
    params = [SamplingParams(temperature=1.0, seed=n, max_tokens=12, ignore_eos=True) for n in range(len(prompts))]
    with torch_engine(folder, dtype="float64") as llm:
        wanted = tokens_of(llm, prompts, params)
    with jax_engine(folder, dtype="float64") as llm:
        assert tokens_of(llm, prompts, params) == wanted
        assert [tokens_of(llm, [one], [how])[0] for one, how in zip(prompts, params, strict=True)] == wanted
    with jax_engine(folder, {"rows": "2,3", "tokens": "24"}, dtype="float64", max_num_seqs=3, in_flight=1) as llm:
        assert tokens_of(llm, prompts, params) == wanted


def test_what_a_step_costs_the_host(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step is one copy to the device, and nothing is compiled or waited for; what it gives is fetched when the
    next one runs. Tokens are those of the torch engine, sampled and greedy, under a constraint too."""
    folder = checkpoints("LlamaForCausalLM", **MODELS["LlamaForCausalLM"])
    prompts = [prompts_of(5, (9, 6, 4))[n] for n in range(3)]
    params = [
        SamplingParams(temperature=0.8, seed=4, top_p=0.9, max_tokens=20, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, frequency_penalty=0.5),
        SamplingParams(temperature=1, seed=11, max_tokens=9, min_tokens=3, stop_token_ids=list(range(40))),
    ]
    with torch_engine(folder) as llm:
        wanted = tokens_of(llm, prompts, params)
    with jax_engine(folder) as llm:
        runner, steps = worker_of(llm)._runner, watched(llm, monkeypatch)
        assert tokens_of(llm, prompts, params) == wanted
        assert tokens_of(llm, prompts, params) == wanted, "from the prefix cache"
        assert runner._steps.compiled.met == 0
        plain = [step for step in steps if not step.plan.new_slots and step.plan.num_rows]
        assert len(plain) > 10 and not any(step.waits for step in steps)
        long = prompts_of(7, (67,) * 4)
        greedy = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)] * len(long)
        assert tokens_of(llm, long, greedy) == tokens_of(llm, long, greedy), "more new pages than travel with a step"
        assert runner._steps.compiled.met == 0
        masked = [step for step in plain if step.sent != 1]
        assert all(step.sent == 3 for step in masked) and len(masked) <= 6, (
            "masks of min_tokens, which two copies bring"
        )


@pytest.mark.parametrize(
    ("dtype", "cache"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")], ids=["32", "16", "8"]
)
def test_the_cache_is_written_in_place(dtype: str, cache: str, checkpoints: Any) -> None:
    """What a step needs of memory besides is a fraction of one layer's pool: it was neither copied nor widened."""
    folder = checkpoints("LlamaForCausalLM", **MODELS["LlamaForCausalLM"])
    sizes = {"num_kv_pages": 4000, "max_num_batched_tokens": 16, "kv_cache_dtype": cache}
    with jax_engine(folder, {"tokens": "16", "warm_up": False}, dtype=dtype, **sizes) as llm:
        runner = worker_of(llm)._runner
        steps, memory = runner._steps, runner._memory
        for bucket in runner._buckets:
            steps.forward(memory, bucket, steps.send(steps.packing(bucket).array()[0]))
        assert len(steps.compiled._functions) == 3
        for key, compiled in steps.compiled._functions.items():
            needs = compiled.memory_analysis()
            assert needs.temp_size_in_bytes < memory.pools[0].nbytes / 2, key
            assert needs.alias_size_in_bytes >= sum(pool.nbytes for pool in memory.pools), key


MESHES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "num_attention_heads": 8, "num_key_value_heads": 4},
    "Gemma2ForCausalLM": {
        "query_pre_attn_scalar": 10, "sliding_window": 5, "num_attention_heads": 8, "num_key_value_heads": 2,
    },
    "MixtralForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": 8},
}  # fmt: skip
"""Heads that are divided, and such as several devices have a copy of."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MESHES)
def test_meshes(architecture: str, checkpoints: Any) -> None:
    """On 1, 2, 4 and 8 devices the tokens are the same, and those of the torch engine; experts dealt whole too, rounded
    weights too."""
    folder = checkpoints(architecture, intermediate_size=48, **MESHES[architecture])
    prompts = prompts_of(6, (19, 5, 33))
    params = [SamplingParams(temperature=0.8, seed=n, max_tokens=10, ignore_eos=True) for n in range(len(prompts))]
    sizes: dict[str, Any] = {"dtype": "float64", "max_num_seqs": 3}
    few: dict[str, Any] = {"rows": "3", "tokens": "32"}
    with torch_engine(folder, **sizes) as llm:
        wanted = tokens_of(llm, prompts, params)
    rounded = None
    deals = [False, True] if "Mixtral" in architecture else [False]
    for size in (1, 2, 4, 8):
        for dealt in deals if size > 1 else [False]:
            division = {"tensor_parallel": size, "expert_parallel": dealt}
            with jax_engine(folder, few | division, **sizes) as llm:
                assert tokens_of(llm, prompts, params) == wanted, f"{division}"
            if size in (1, 4):
                with jax_engine(folder, few | division | {"weights": "int8"}, **sizes) as llm:
                    found = tokens_of(llm, prompts, params)
                rounded = rounded or found
                assert found == rounded, f"{division}, rounded"


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["int8", "fp8"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_rounded_weights(rounding: str, architecture: str, checkpoints: Any, tmp_path: Any) -> None:
    """Tokens are those of a plain checkpoint that holds what the rounded weights stand for."""
    from safetensors.torch import load_file, save_file

    folder = checkpoints(architecture, **MODELS[architecture])
    for name in folder.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed" not in name and not name.endswith("mlp.gate.weight"):
            largest = tensor.double().abs().amax(1, keepdim=True)
            scale = largest / (127 if rounding == "int8" else 448)
            codes = (tensor.double() / scale).round() if rounding == "int8" else (tensor.double() / scale)
            codes = codes if rounding == "int8" else codes.float().to(torch.float8_e4m3fn).double()
            tensors[name] = codes * scale
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = prompts_of(2)
    params = [SamplingParams(temperature=0.8, seed=n, max_tokens=8, ignore_eos=True) for n in range(len(prompts))]
    with torch_engine(tmp_path, dtype="float64") as llm:
        wanted = tokens_of(llm, prompts, params)
    with jax_engine(folder, {"weights": rounding}, dtype="float64") as llm:
        assert tokens_of(llm, prompts, params) == wanted
        assert llm.llm_engine.client.worker.weight_bytes < 8 * llm.llm_engine.client.worker.num_parameters


@pytest.mark.slow
def test_engine_on_the_kernel(checkpoints: Any) -> None:
    """The Pallas kernel in the place of XLA's form, interpreted: the same tokens."""
    folder = checkpoints("LlamaForCausalLM", head_dim=128)
    prompts, few = prompts_of(1, (19, 5)), {"rows": "2", "tokens": "32"}
    params = [SamplingParams(temperature=0.8, seed=n, max_tokens=4, ignore_eos=True) for n in range(len(prompts))]
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 32}
    with jax_engine(folder, few, **sizes) as llm:
        wanted = tokens_of(llm, prompts, params)
    with jax_engine(folder, few | {"attention": "pallas"}, **sizes) as llm:
        assert tokens_of(llm, prompts, params) == wanted


@pytest.mark.slow
def test_constraints_and_what_they_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that follow a step, and tokens that a constraint forces, which steps compute ahead as drafts: the torch
    engine's tokens, greedy and drawn."""
    choices = ["the quick brown fox jumps over the lazy dog", "the quick red fox", "a dog"]
    prompts = [[5, 6, 7], [20, 21], [9]]
    params = [
        SamplingParams(temperature=t, seed=n, max_tokens=24, structured_outputs=StructuredOutputsParams(choice=choices))
        for n, t in enumerate((0.0, 1.0, 1.5))
    ]
    params[2].structured_outputs = None
    with torch_engine("tiny") as llm:
        wanted = tokens_of(llm, prompts, params)
    with jax_engine("tiny") as llm:
        runner, given = worker_of(llm)._runner, []
        execute = runner.execute

        def seen(plan: Any) -> Any:
            given.append(plan.given_drafts is not None)
            return execute(plan)

        monkeypatch.setattr(runner, "execute", seen)
        assert tokens_of(llm, prompts, params) == wanted
        assert any(given), "nothing was forced"
        assert runner._steps.compiled.met == 0


@pytest.mark.slow
def test_several_cores(checkpoints: Any) -> None:
    """Engine cores beside each other, each with its own two devices."""
    folder = checkpoints("Qwen3ForCausalLM", **MODELS["Qwen3ForCausalLM"])
    prompts = prompts_of(8, (9, 6, 4, 12))
    params = [SamplingParams(temperature=0.8, seed=n, max_tokens=6, ignore_eos=True) for n in range(len(prompts))]
    with torch_engine(folder, dtype="float64") as llm:
        wanted = tokens_of(llm, prompts, params)
    platform = {"tensor_parallel": 2, "rows": "4", "tokens": "32"}
    with jax_engine(folder, platform, dtype="float64", data_parallel_size=2) as llm:
        assert tokens_of(llm, prompts, params) == wanted


def test_refusals(checkpoints: Any) -> None:
    """What is not served is refused at the start, and says what to do."""
    folder = checkpoints("LlamaForCausalLM", **MODELS["LlamaForCausalLM"])
    for words, settings_, error in (
        ("--tensor-parallel-size", {"tensor_parallel_size": 2}, EngineError),
        ("brings its own", {"attention": "torch"}, ConfigError),
        ("batch_invariant", {"batch_invariant": True}, EngineError),
        ("generates text alone", {"runner": "pooling"}, EngineError),
        ("marks no pages", {"kv_canary": True}, ConfigError),
        ("fp8 alone", {"kv_cache_dtype": "int8"}, ConfigError),
        ("fp8 alone", {"kv_cache_dtype": "float16"}, ConfigError),
        ("page 0 is", {"num_kv_pages": 1}, KVCacheTooSmallError),
        ("bfloat16, float32", {"dtype": "float16"}, EngineError),
        ("tcp.*computes with torch, the platform with jax", {"kv_connector": "tcp"}, EngineError),
        ("lora.*computes with torch", {"adapter": "lora"}, EngineError),
        ("brings its own", {"logits_processors": "whisper"}, ConfigError),
        ("worker of its own", {"evictor": "cacheblend"}, ConfigError),
        ("takes tokens alone", {"enable_prompt_embeds": True}, ConfigError),
    ):
        with pytest.raises(error, match=words):
            jax_engine(folder, **settings_)
    for words, platform in (
        ("num_attention_heads 4 does not divide over 8", {"tensor_parallel": 8}),
        ("no routed experts", {"expert_parallel": True}),
        ("heads of 8 elements", {"attention": "pallas"}),
    ):
        with pytest.raises(ConfigError, match=words):
            jax_engine(folder, platform)
    with pytest.raises(ConfigError, match="no safetensors files"):
        jax_engine("dummy:tiny", load_format="dummy")
    with pytest.raises(ConfigError, match="one device"):
        jax_engine(checkpoints("MixtralForCausalLM", **MODELS["MixtralForCausalLM"]), {"expert_parallel": True})
    with pytest.raises(EngineError, match=r"finds no TPU|JAX finds"):
        jax_engine(folder, {"device": "tpu"})
    with pytest.raises(EngineError, match="ascending"):
        jax_engine(folder, {"rows": "4,1"})


@pytest.mark.parametrize(
    ("rows", "tokens"), [([], []), ([1, 64], []), ([], [24]), ([3], [8, 128])], ids=["powers", "64", "24", "3-128"]
)
def test_buckets_hold_every_step(rows: list[int], tokens: list[int]) -> None:
    """Every step has a bucket that is compiled at the start: with drafts too, as far as rows draw twice or all 64."""
    buckets = Buckets(10, 128, rows, tokens)
    made = set(buckets)
    assert next(iter(buckets)).draws == max(bucket.draws for bucket in made), "memory is measured by it"
    for num_rows in range(1, 11):
        assert buckets.of(num_rows, num_rows, num_rows, True) in made
        for num_tokens in range(num_rows, 129):
            for draws in {*range(num_rows + 1), min(num_tokens, 41), min(num_tokens, 64)}:
                found = buckets.of(num_rows, num_tokens, draws, False)
                assert found in made and found.tokens >= num_tokens and found.draws >= draws


def test_requests_that_are_refused(checkpoints: Any, tmp_path: Path) -> None:
    """What nothing honours here is told when it is asked; so is a second profile, and the end of none. A
    profile that nobody stopped ends with the engine, and leaves a file."""
    folder = checkpoints("LlamaForCausalLM", **MODELS["LlamaForCausalLM"])
    with jax_engine(folder, {"warm_up": False}, profile_dir=str(tmp_path / "new")) as llm:
        with pytest.raises(InvalidRequestError, match="no logits processor at work takes an argument of this name"):
            tokens_of(llm, [[1, 2]], [SamplingParams(extra_args={"hotter": 2.0})])
        with pytest.raises(InvalidRequestError, match=f"vocabulary ends at {VOCAB_SIZE - 1}"):
            tokens_of(llm, [[1, 2]], [SamplingParams(logit_bias={VOCAB_SIZE: 2.0})])
        worker = worker_of(llm)
        with pytest.raises(InvalidRequestError, match="start one first"):
            worker.stop_profile()
        worker.start_profile()
        with pytest.raises(InvalidRequestError, match="stop it first"):
            worker.start_profile()
    assert list((tmp_path / "new").rglob("*.xplane.pb"))


def test_what_the_kernel_does_not_serve() -> None:
    """Heads, pages and block tables that a TPU's memories cannot hold as they are."""
    assert attention_pallas.unsupported(128, 16, 2, 64, 16_384) == ""
    assert "registers" in attention_pallas.unsupported(64, 16, 2, 64, 16_384)
    assert "--block-size 32" in attention_pallas.unsupported(128, 16, 1, 64, 16_384)
    assert "2,621,440 bytes" in attention_pallas.unsupported(128, 16, 2, 256, 40_960)


@pytest.mark.slow
def test_bad_checkpoints(checkpoints: Any, tmp_path: Any) -> None:
    """Tensors that are missing, unexpected or of another shape are named; a broken file is too."""
    from safetensors.torch import load_file, save_file

    folder = checkpoints("LlamaForCausalLM", **MODELS["LlamaForCausalLM"])
    for name in folder.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    file = tmp_path / "model.safetensors"
    tensors = load_file(folder / "model.safetensors")
    moved = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.layers.1.mlp.odd"] = moved
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="up_proj.weight missing") as caught:
        jax_engine(tmp_path)
    assert "model.norm.weight" in str(caught.value) and "odd unexpected" in str(caught.value)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="truncated"):
        jax_engine(tmp_path)


@pytest.mark.slow
def test_without_torch(checkpoints: Any, tmp_path: Path) -> None:
    """A plain process that serves with it, with drafter and connectors, has no torch imported, nor has a process of a
    rank."""
    code = """
import json, sys
from engine import LLM, SamplingParams
def main():
    folder, cache, store, settings = json.loads(sys.argv[1])
    options = {"platform": {"device": "cpu", "cache_dir": cache, "tokens": "32", "rows": "4"}}
    options["kv_connector"] = {"path": store}
    more = {"drafter": "suffix", "kv_connector": "host,file", "swap_space": 1 << 20}
    for executor in ("inline", "process"):
        with LLM(folder, platform="tpu", options=options, executor=executor, **more, **settings) as llm:
            out = llm.generate([{"prompt_token_ids": [5, 6] * 12}], SamplingParams(max_tokens=3), use_tqdm=False)
            import psutil
            maps = [m.path for p in psutil.Process().children(recursive=True) for m in p.memory_maps()]
            print(json.dumps([len(out[0].outputs[0].token_ids), "torch" in sys.modules, len(maps),
                              any("libtorch" in m for m in maps)]))
if __name__ == "__main__":
    main()
"""
    settings_ = {"dtype": "float32", "num_kv_pages": 20, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    folder = checkpoints("LlamaForCausalLM", **MODELS["LlamaForCausalLM"])
    given = json.dumps([str(folder), CACHE, str(tmp_path), {**settings_, "max_model_len": 64}])
    done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    inline, process = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert inline[:2] == [3, False]
    assert process[:2] == [3, False] and process[2] > 0 and process[3] is False
