"""The engine on a GPU: the tokens of transformers, of uncaptured steps and of one step at a time; and no waiting."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False: no GPU here"),
]
PARITY = Path(__file__).parents[2] / "plugins" / "reference" / "tests" / "parity" / "checkpoints.py"
LENGTHS, NEW_TOKENS = (70, 5, 23, 1, 40, 100, 16, 33), 24
SIZES: dict[str, Any] = {
    "platform": "cuda", "max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory": 32 << 20, "seed": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    """What makes random checkpoints with transformers, from the core's tests."""
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("gpu_parity_checkpoints", PARITY)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(parity: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with grouped heads, of the head size that every attention driver serves."""
    path: Path = parity.make_checkpoint(
        tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", heads=4, kv_heads=2, head_dim=128, hidden=256
    )
    return path


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in LENGTHS]


def generate(folder: Path, params: SamplingParams | list[SamplingParams], **settings: Any) -> list[list[int]]:
    with LLM(model=str(folder), **(SIZES | settings)) as llm:
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts()]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def mixed(max_tokens: int = NEW_TOKENS, penalty: float = 1.1) -> list[SamplingParams]:
    """Greedy rows and drawn ones, with every filter and with penalties."""
    return [
        SamplingParams(
            temperature=0.8 if index % 2 else 0.0,
            seed=index,
            top_p=0.95 if index % 3 else 1.0,
            top_k=20 if index % 4 else 0,
            repetition_penalty=penalty if index % 5 == 1 else 1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for index in range(len(LENGTHS))
    ]


def logits_of(parity: ModuleType, folder: Path, dtype: torch.dtype, sequences: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits on the GPU for whole sequences, float32 [n, V] each."""
    model = parity.load_oracle(folder, dtype).cuda()
    with torch.inference_mode():
        return [model(torch.tensor([ids], device="cuda")).logits[0].float().cpu() for ids in sequences]


def check(parity: ModuleType, folder: Path, outputs: list[list[int]], slack: list[float]) -> None:
    """No token's logit lies further below the best one of a float32 oracle than the slack of its sequence."""
    sequences = [prompt + tokens for prompt, tokens in zip(prompts(), outputs, strict=True)]
    for logits, length, tokens, allowed in zip(
        logits_of(parity, folder, torch.float32, sequences), LENGTHS, outputs, slack, strict=True
    ):
        places = logits[length - 1 : -1]
        behind = places.max(dim=1).values - places.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert behind.max().item() <= allowed, f"prompt of {length}: {behind.max().item()} behind, {allowed} allowed"


FEW_ROWS = {"ops": "triton_gemv,triton", "max_num_seqs": 4}
each_product = pytest.mark.parametrize("products", [{}, FEW_ROWS], ids=["as chosen", "of few rows"])


@each_product
def test_greedy_tokens_are_those_of_transformers_in_float32(
    parity: ModuleType, folder: Path, products: dict[str, Any]
) -> None:
    """Each token is the best one after those before it, but for two that lie within 1e-3 of each other."""
    check(parity, folder, generate(folder, GREEDY, dtype="float32", **products), [1e-3] * len(LENGTHS))


@each_product
def test_greedy_tokens_in_bfloat16_are_within_what_bfloat16_costs(
    parity: ModuleType, folder: Path, products: dict[str, Any]
) -> None:
    """No token is further from the best than four times what bfloat16 changes in transformers' own logits."""
    outputs = generate(folder, GREEDY, dtype="bfloat16", **products)
    sequences = [prompt + tokens for prompt, tokens in zip(prompts(), outputs, strict=True)]
    exact, rounded = (logits_of(parity, folder, dtype, sequences) for dtype in (torch.float32, torch.bfloat16))
    slack = [4 * (a - b).abs().max().item() for a, b in zip(exact, rounded, strict=True)]
    check(parity, folder, outputs, slack)


@each_product
def test_dependents_say_the_same(folder: Path, products: dict[str, Any]) -> None:
    """Kernels that begin before those ahead of them have ended: the same bits, for they wait for what they read."""
    settings = {"dtype": "bfloat16", "platform.capture": "always", **products}
    found = [generate(folder, mixed(), **settings, **{"platform.dependents": each}) for each in ("auto", "never")]
    assert found[0] == found[1]


@pytest.mark.parametrize("drafts", [{}, {"drafter": "ngram", "drafter.num_tokens": 3, "drafter.min_match": 1}], ids=str)
def test_captured_steps_give_the_tokens_of_uncaptured_ones(folder: Path, drafts: dict[str, Any]) -> None:
    found = [
        generate(folder, mixed(), dtype="float32", **{"platform.capture": capture}, **drafts)
        for capture in ("never", "always")
    ]
    assert found[0] == found[1]


def arriving(folder: Path, **settings: Any) -> list[list[int]]:
    """The tokens of prompts that come one after the other, while those before them decode; some in two chunks."""
    tokens: list[list[int]] = [[] for _ in LENGTHS]
    with LLM(model=str(folder), dtype="float32", attention="triton", **(SIZES | settings)) as llm:
        engine = llm.llm_engine
        for index, (prompt, params) in enumerate(zip(prompts(), mixed(), strict=True)):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            for _ in range(2):
                for output in engine.step():
                    tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return tokens


def test_captured_steps_with_prompts_give_the_tokens_of_uncaptured_ones(folder: Path) -> None:
    settings: dict[str, Any] = {"platform.capture": "always", "max_num_batched_tokens": 64}
    eager = arriving(folder, **settings, **{"platform.capture_mixed": "never"})
    assert eager == arriving(folder, **settings, **{"platform.capture_mixed": "16,32,64"})
    assert all(len(tokens) == NEW_TOKENS for tokens in eager)


@pytest.mark.parametrize("penalty", [1.0, 1.1])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"platform.dependents": "auto"},
        FEW_ROWS,
        pytest.param(
            {"attention": "flash"},
            marks=pytest.mark.skipif(importlib.util.find_spec("flash_attn_3") is None, reason="no FlashAttention 3"),
        ),
    ],
    ids=str,
)
def test_whole_steps_give_the_tokens_of_others(folder: Path, more: dict[str, Any], penalty: float) -> None:
    """Bit by bit, with two in flight; where rows have penalties beside others, they take turns with steps as before."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "in_flight": 2, "platform.capture": "always", **more}
    without, whole = (
        generate(folder, mixed(penalty=penalty), **settings, **{"platform.capture_whole": each})
        for each in ("never", "auto")
    )
    assert without == whole


def test_whole_steps_of_latent_attention() -> None:
    """Drawn weights: nothing but the two ways is compared."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "platform.capture": "always", "attention": "mla"}
    without, whole = (
        generate(Path("dummy:mla-2.6B,layers=2"), mixed(penalty=1.0), **settings, **{"platform.capture_whole": each})
        for each in ("never", "auto")
    )
    assert without == whole


def test_whole_steps_beside_prompts_give_the_tokens_of_others(folder: Path) -> None:
    settings: dict[str, Any] = {"platform.capture": "always", "max_num_batched_tokens": 64}
    assert arriving(folder, **settings) == arriving(folder, **settings, **{"platform.capture_whole": "auto"})


def test_drafts_change_no_token(folder: Path) -> None:
    drafts: dict[str, Any] = {"drafter": "ngram", "drafter.num_tokens": 4, "drafter.min_match": 1}
    assert generate(folder, mixed(), dtype="float32", **drafts) == generate(folder, mixed(), dtype="float32")


def test_steps_in_flight_give_the_tokens_of_one_at_a_time(folder: Path) -> None:
    assert generate(folder, mixed(), dtype="float32", in_flight=2) == generate(
        folder, mixed(), dtype="float32", in_flight=1
    )


@pytest.fixture
def decoding(folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine in the middle of decoding all rows."""
    with LLM(model=str(folder), dtype="bfloat16", in_flight=2, **SIZES, **request.param) as llm:
        engine = llm.llm_engine
        penalty = 1.0 if "platform.capture_whole" in request.param else 1.1  # with one, no step is whole
        for index, (prompt, params) in enumerate(zip(prompts(), mixed(100, penalty), strict=True)):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        for _ in range(24):
            engine.step()
        torch.cuda.synchronize()
        yield engine
        engine.abort_request([str(index) for index in range(len(LENGTHS))])
        while engine.has_unfinished_requests():
            engine.step()


DRAFTS = {"drafter": "ngram", "drafter.num_tokens": 3, "drafter.min_match": 1}
WHOLE = {"platform.capture": "always", "platform.capture_whole": "auto"}
each_step = pytest.mark.parametrize("decoding", [{}, DRAFTS, WHOLE], indirect=True, ids=["plain", "drafts", "whole"])


@each_step
def test_no_decode_step_synchronises(decoding: Any) -> None:
    """Torch itself raises where an operation of its own waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):
            decoding.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize", "cuCtxSynchronize")


@each_step
def test_the_profiler_sees_no_wait_in_decode_steps(decoding: Any) -> None:
    """What waits is the copy of the tokens back, on an event; nothing waits for the whole stream or device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("steps"):
        for _ in range(8):
            decoding.step()
    on_host = [event for event in profile.events() or () if event.device_type == torch._C._autograd.DeviceType.CPU]
    (steps,) = [event.time_range for event in on_host if event.name == "steps"]
    # The profiler's own waits, before and after, differ from version to version.
    names = [event.name for event in on_host if steps.start <= event.time_range.start <= steps.end]
    assert any("Launch" in name for name in names), "the profiler saw the launches"
    waits = [name for name in names if name in WAITS]
    assert not waits, f"{len(waits)} waits in 8 steps: {sorted(set(waits))}"
