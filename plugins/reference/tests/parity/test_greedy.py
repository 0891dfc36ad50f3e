"""Greedy tokens against `transformers.generate`, in float32, through the whole engine.

Two computations of the same float32 model differ in the last bits, so tokens must be equal except after a position
where the oracle's two best logits are within 1e-4 of each other; there the engine's log probabilities must be within
1e-3, and such positions must be rare (under 0.1 %).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, LATENT_ARCHITECTURES, ROPES, load_oracle
from pairwise import pairwise

from engine import LLM, SamplingParams

NEW_TOKENS = 16
MARGIN = 1e-4
TOLERANCE = 1e-3
PROMPT_LENGTHS = (70, 5, 23, 1, 40, 100, 16, 33)
"""Past yarn's and llama3's original length (64) and the sliding window (20), at and beside multiples of block sizes."""

CHECKPOINT: dict[str, tuple[Any, ...]] = {
    "architecture": ARCHITECTURES,
    "rope": tuple(ROPES),
    "heads": ((4, 2), (4, 1), (6, 6), (8, 2)),
    "head_dim": (32, 48, 64, 80, 128),
    "dtype": ("float32", "bfloat16", "float16"),
}
VARIANTS: dict[str, tuple[Any, ...]] = {
    "sliding": (None, 20),
    "tie": (False, True),
    "shards": (1, 2),
    "bias": (False, True),
}
LATENT: dict[str, tuple[Any, ...]] = {
    "architecture": LATENT_ARCHITECTURES,
    "rope": ("yarn-mscale", "default"),
    "q_lora_rank": (48, None),
    "bias": (False, True),
    "dtype": ("float32", "bfloat16"),
}
ENGINE: dict[str, tuple[Any, ...]] = {"batch": (1, 3, 8), "block_size": (16, 8, 32)}
BUDGET: dict[str, tuple[Any, ...]] = {"budget": (2048, 24)}


@dataclass
class Expected:
    """The oracle's answer to one prompt: tokens [n], and float32 logits [n, V] that they were taken from."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


@dataclass
class Tally:
    """Positions compared, and those where the oracle itself was undecided and the engine chose otherwise."""

    positions: int = 0
    ties: int = 0


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    """Fails at the end of the module where undecided positions were not rare."""
    counts = Tally()
    yield counts
    assert counts.ties <= max(1, 0.001 * counts.positions), counts


def make_latent(checkpoints: Any, case: dict[str, Any]) -> Path:
    """The case's checkpoint with latent attention."""
    return checkpoints(**{key: value for key, value in case.items() if key in LATENT})


def make(checkpoints: Any, case: dict[str, Any]) -> Path:
    """The case's checkpoint."""
    heads, kv_heads = case["heads"]
    features = {key: case[key] for key in ("rope", "head_dim", "dtype", *VARIANTS) if key in case}
    return checkpoints(case["architecture"], heads=heads, kv_heads=kv_heads, **features)


@functools.lru_cache(maxsize=2)
def oracle(folder: Path, count: int, dtype: str = "float32") -> list[Expected]:
    """`transformers.generate` on `count` prompts, each alone."""
    model = load_oracle(folder, getattr(torch, dtype))
    model.generation_config.eos_token_id = None  # tokens are compared to the full length
    generator = torch.Generator().manual_seed(3)
    answers = []
    for length in PROMPT_LENGTHS[:count]:
        prompt = torch.randint(256, (1, length), generator=generator)
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers.append(Expected(prompt[0].tolist(), out.sequences[0, length:].tolist(), torch.cat(out.logits)))
    return answers


def compare(expected: Expected, output: Any, tally: Tally) -> None:
    """One completion against the oracle's, as the module's docstring says."""
    assert len(output.token_ids) == NEW_TOKENS and output.finish_reason == "length"
    for position, (ours, theirs) in enumerate(zip(output.token_ids, expected.tokens, strict=True)):
        tally.positions += 1
        logprobs = expected.logits[position].log_softmax(-1)
        best = expected.logits[position].topk(2).values
        for token, entry in output.logprobs[position].items():
            assert entry.logprob == pytest.approx(logprobs[token].item(), rel=TOLERANCE, abs=TOLERANCE)
        if ours != theirs:
            assert (best[0] - best[1]).item() < MARGIN, f"position {position}: {ours} for {theirs}"
            tally.ties += 1
            return  # what follows has another context


def check(folder: Path, case: dict[str, Any], tally: Tally, dtype: str = "float32") -> None:
    """The engine's tokens for the case's batch."""
    expected = oracle(folder, case["batch"], dtype)
    llm = LLM(
        model=str(folder),
        dtype=dtype,
        block_size=case["block_size"],
        max_num_batched_tokens=case.get("budget", 2048),
        max_num_seqs=8,
        kv_cache_memory=None if "pages" in case else 16 * 2**20,
        num_kv_pages=case.get("pages"),
    )
    try:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
        prompts = [{"prompt_token_ids": answer.prompt} for answer in expected]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    for answer, output in zip(expected, outputs, strict=True):
        assert output.prompt_token_ids == answer.prompt
        compare(answer, output.outputs[0], tally)


def name(case: dict[str, Any]) -> str:
    """A readable test id."""
    return "-".join(f"{key}:{value}".replace(" ", "") for key, value in case.items())


@pytest.mark.parametrize("case", pairwise(CHECKPOINT | VARIANTS | ENGINE | BUDGET), ids=name)
def test_pairwise(checkpoints: Any, tally: Tally, case: dict[str, Any]) -> None:
    """Every pair of values of every two factors."""
    check(make(checkpoints, case), case, tally)


@pytest.mark.parametrize("case", pairwise(LATENT | {"batch": (8, 3), "block_size": (16, 8), **BUDGET}), ids=name)
def test_latent(checkpoints: Any, tally: Tally, case: dict[str, Any]) -> None:
    """Latent attention: DeepSeek's decoders, alone and batched, prompts whole and in chunks."""
    check(make_latent(checkpoints, case), case, tally)


def test_latent_preempted(checkpoints: Any, tally: Tally) -> None:
    """Pages so few that requests take each other's, and are computed again."""
    case = {"architecture": "DeepseekV3ForCausalLM", "batch": 8, "block_size": 8, "budget": 24, "pages": 24}
    check(make_latent(checkpoints, case), case, tally)


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint", [dict(zip(CHECKPOINT, values, strict=True)) for values in product(*CHECKPOINT.values())], ids=name
)
def test_product(checkpoints: Any, tally: Tally, checkpoint: dict[str, Any]) -> None:
    """Every combination of checkpoint, batch size and block size."""
    folder = make(checkpoints, checkpoint)
    for values in product(*ENGINE.values()):
        check(folder, checkpoint | dict(zip(ENGINE, values, strict=True)), tally)
    checkpoints.drop(folder)


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [
        pytest.param(architecture, rope, marks=() if (i - j) % len(ARCHITECTURES) == 0 else pytest.mark.slow)
        for i, architecture in enumerate(ARCHITECTURES)
        for j, rope in enumerate(ROPES)
    ],
)
def test_float64(checkpoints: Any, architecture: str, rope: str) -> None:
    """In float64 every token is equal, without exception; transformers' float32 parts are widened for it."""
    exact = Tally()
    case = {"batch": 8, "block_size": 16, "budget": 24}
    check(checkpoints(architecture, rope=rope, sliding=20), case, exact, "float64")
    assert exact.ties == 0 and exact.positions == 8 * NEW_TOKENS


@pytest.mark.parametrize("architecture", LATENT_ARCHITECTURES)
def test_latent_float64(checkpoints: Any, architecture: str) -> None:
    """The same of latent attention, with everything that its config may ask for."""
    exact = Tally()
    case = {"batch": 8, "block_size": 16, "budget": 24}
    check(checkpoints(architecture, rope="yarn-mscale", bias=True), case, exact, "float64")
    assert exact.ties == 0 and exact.positions == 8 * NEW_TOKENS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_end_of_sequence(checkpoints: Any, architecture: str) -> None:
    """Generation ends with the end-of-sequence token where transformers ends it."""
    folder = checkpoints(architecture)
    answers = oracle(folder, 8)
    answer, end = next((a, token) for a in answers for token in a.tokens[2:8] if token not in a.tokens[:2])
    model = load_oracle(folder, torch.float32)
    model.generation_config.eos_token_id = end
    prompt = torch.tensor([answer.prompt])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS)
    llm = LLM(model=str(folder), dtype="float32", kv_cache_memory=16 * 2**20)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, stop_token_ids=[end])
        output = llm.generate({"prompt_token_ids": answer.prompt}, params, use_tqdm=False)[0].outputs[0]
    finally:
        llm.shutdown()
    assert output.finish_reason == "stop" and output.stop_reason == end
    assert [*output.token_ids] == ids[0, len(answer.prompt) :].tolist()


def test_pairwise_covers_all_pairs() -> None:
    """The generator keeps its promise, in far fewer rows than the product."""
    factors = CHECKPOINT | VARIANTS | ENGINE | BUDGET
    rows = pairwise(factors)
    for f, g in product(factors, factors):
        if f < g:
            assert {(row[f], row[g]) for row in rows} == set(product(factors[f], factors[g]))
    assert len(rows) < 45
    assert rows == pairwise(factors)
