"""A toy adapter in an engine: requests with it and without it in one batch get the tokens that they get alone, those
with it of weights into which it is merged, in float64; whatever is chunked, preempted, or found in the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import with_part
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from schedules import examples

import engine_tiny
from engine import LLM, SamplingParams
from engine.interfaces.step import StepPart
from engine.runner import assemble
from engine.types.plan import NewSlot, StepPlan
from engine_kit.safetensors_files import read_safetensors
from engine_sdk.toy_adapter import ToyAdapters, merged

ADAPTED = "adapted"
"""The salt of requests that the adapter is for: what they computed nobody else may find."""
MOST_TOKENS = 512

Answer = Callable[[tuple[int, ...], bool, int], list[int]]


class Rows(StepPart):
    """Knows which tokens of a step the adapter is for."""

    def __init__(self) -> None:
        self._slots = np.zeros(64, bool)
        self._tokens = torch.zeros(MOST_TOKENS, dtype=torch.bool)

    def enter(self, new: NewSlot) -> None:
        self._slots[new.slot] = new.cache_salt == ADAPTED

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> dict[str, torch.Tensor]:
        of_row = self._slots[plan.slot_of_row]
        mine = of_row.repeat(tokens_per_row) if tokens_per_row else of_row.repeat(plan.num_tokens)
        self._tokens[: mine.size] = torch.from_numpy(mine)
        return {}

    def active(self, num_tokens: int) -> torch.Tensor:
        return self._tokens[:num_tokens]


def engine(model: str = "tiny", **changes: Any) -> LLM:
    common = {"dtype": "float64", "block_size": 4, "max_num_seqs": 4, "max_model_len": 64, "num_kv_pages": 200}
    return LLM(model, **{**common, **changes})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answer]:
    """What a request gets by itself: of the bundled model, or of that with the adapter merged into its weights."""
    source, folder = Path(engine_tiny.__file__).parent / "model", tmp_path_factory.mktemp("merged")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(merged(read_safetensors([source / "model.safetensors"])), folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float64"}))
    with engine() as plain, engine(str(folder)) as adapted:

        @cache
        def answer(prompt: tuple[int, ...], with_adapter: bool, count: int) -> list[int]:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            llm = adapted if with_adapter else plain
            return llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)[0].outputs[0].token_ids

        yield answer


@pytest.fixture(scope="module", params=["roomy", "chunked", "scarce"])
def adapting(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Adapts the requests of one salt. `scarce` has pages for one long request, and preempts the others."""
    settings = {"roomy": {}, "chunked": {"max_num_batched_tokens": 6}, "scarce": {"num_kv_pages": 14}}[request.param]
    rows = Rows()
    with pytest.MonkeyPatch.context() as patch:
        with_part(rows, patch)
        made, toys = assemble.ModelContext, ToyAdapters(rows.active)
        patch.setattr(assemble, "ModelContext", lambda *args, **named: made(*args, **{**named, "adapters": toys}))
        llm = engine(**settings)
    with llm:
        yield llm


PROMPTS = st.lists(st.integers(5, 60), min_size=1, max_size=14).map(tuple)
SHARED = st.sampled_from([(7,) * 9, (7,) * 9 + (8, 9), tuple(range(20, 33))])
REQUESTS = st.tuples(PROMPTS | SHARED, st.booleans(), st.integers(1, 24), st.integers(0, 6))


@given(requests=st.lists(REQUESTS, min_size=2, max_size=5))
@settings(max_examples=examples(6))
def test_in_any_batch_it_is_what_merged_weights_are(adapting: LLM, alone: Answer, requests: list[Any]) -> None:
    llm, waiting, found = adapting.llm_engine, dict(enumerate(requests)), {}
    step = 0
    while waiting or llm.has_unfinished_requests():
        for number, (prompt, with_adapter, count, arrival) in list(waiting.items()):
            if arrival <= step:
                del waiting[number]
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                given_ = {"prompt_token_ids": list(prompt), "cache_salt": ADAPTED if with_adapter else "none"}
                llm.add_request(str(number), given_, params)
        for output in llm.step():
            if output.finished:
                found[int(output.request_id)] = output.outputs[0].token_ids
        step += 1
    for number, (prompt, with_adapter, count, _) in enumerate(requests):
        assert found[number] == alone(prompt, with_adapter, count)


def test_the_oracle_tells_them_apart_and_pages_run_out(adapting: LLM, alone: Answer) -> None:
    """What the property would hide: that the adapter changes nothing, that nobody is preempted."""
    assert alone((7,) * 9, True, 8) != alone((7,) * 9, False, 8)
    llm = adapting.llm_engine
    for number in range(4):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        salt = ADAPTED if number % 2 else "none"
        llm.add_request(f"r{number}", {"prompt_token_ids": [30 + number] * 12, "cache_salt": salt}, params)
    before = llm.stats().num_preemptions
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                number = int(output.request_id[1:])
                assert output.outputs[0].token_ids == alone((30 + number,) * 12, bool(number % 2), 24)
    if llm.stats().pages_total < 50:
        assert llm.stats().num_preemptions > before
