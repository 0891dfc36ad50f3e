"""Adapters in every call that takes them, and under traffic: each as its merged model, alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_adapters import CONFIG
from test_adapted_engine import ADAPTED, FORMS, GREEDY, PROMPTS, SETTINGS, Adapters

from engine import LLM, SamplingParams
from engine_kit.beam_search import BeamSearchParams
from engine_lora import LoRARequest

POOLED: dict[str, Any] = {"runner": "pooling", **SETTINGS}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm(adapters: Adapters) -> Iterator[LLM]:
    with LLM(model=adapters.model, **{**ADAPTED, "num_kv_pages": 64, "adapter.max_cpu_loras": 3}) as llm:
        yield llm


def merged(adapters: Adapters, index: int) -> str:
    """The model into which an adapter is merged."""
    name = [*FORMS][index - 1]
    return adapters.model if index == 0 else str(Path(adapters.model).parent / f"merged-{name}")


def test_beams(adapters: Adapters, llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    expected = []
    for index in (1, 3):
        with LLM(model=merged(adapters, index), **SETTINGS) as alone:
            expected += alone.beam_search(PROMPTS, params)
    each = [adapters.requests[index] for index in (1, 3) for _ in PROMPTS]
    found = llm.beam_search(PROMPTS * 2, params, lora_request=each)
    assert [[s.tokens for s in one.sequences] for one in found] == [
        [s.tokens for s in one.sequences] for one in expected
    ]


@pytest.mark.parametrize("headless", [False, True], ids=["of a generating model", "of a model without a head"])
def test_vectors(adapters: Adapters, tmp_path: Path, headless: bool) -> None:
    """Of all in one call, those of each model; also where PEFT's names stand without `model.`, as of models that are
    trained without their head."""
    request = adapters.requests[1]
    assert request is not None
    if headless:
        from safetensors.torch import load_file, save_file

        tensors = load_file(Path(request.path) / "adapter_model.safetensors")
        short = {name.replace(".model.model.", ".model."): tensor for name, tensor in tensors.items()}
        config = json.loads((Path(request.path) / "adapter_config.json").read_text())
        (tmp_path / "short").mkdir()
        (tmp_path / "short" / "adapter_config.json").write_text(json.dumps(config))
        save_file(short, tmp_path / "short" / "adapter_model.safetensors")
        request = LoRARequest("short", 0, tmp_path / "short")
    expected = []
    for model in (adapters.model, merged(adapters, 1)):
        with LLM(model=model, **POOLED) as alone:
            expected += [output.outputs.embedding for output in alone.embed(PROMPTS, use_tqdm=False)]
    with LLM(model=adapters.model, **{**ADAPTED, **POOLED}) as served:
        each = [None] * len(PROMPTS) + [request] * len(PROMPTS)
        found = [output.outputs.embedding for output in served.embed(PROMPTS * 2, use_tqdm=False, lora_request=each)]
        scores = served.score([[5, 9]], [[5, 9, 11]], use_tqdm=False, lora_request=request)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert not np.allclose(found[0], found[len(PROMPTS)], atol=1e-3) and len(scores) == 1
    assert len(found[0]) == CONFIG["hidden_size"]


NUMBERS = itertools.count()
MOVES = st.one_of(
    st.tuples(st.just("asks"), st.integers(0, len(FORMS)), st.integers(0, len(PROMPTS) - 1), st.integers(1, 10)),
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.just("gives up"), st.integers(0, 99)),
    st.tuples(st.just("loads"), st.integers(1, len(FORMS))),
    st.tuples(st.just("unloads"), st.integers(1, len(FORMS))),
)


@given(moves=st.lists(MOVES, min_size=4, max_size=30))
@settings(max_examples=12, deadline=None)
def test_whatever_comes_and_goes(adapters: Adapters, llm: LLM, moves: list[Any]) -> None:
    """Requests of more adapters than there are places and room for, some of which are given up, while adapters are
    loaded and unloaded: each gets what its adapter gives alone, and afterwards nothing is held."""
    engine = llm.llm_engine
    asked: dict[str, tuple[int, int, int]] = {}
    found: dict[str, list[int]] = {}
    for move, *what in moves:
        if move == "asks":
            index, prompt, count = what
            request = adapters.requests[index]
            given_: dict[str, Any] = {**PROMPTS[prompt], **({} if request is None else {"adapter": request})}
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
            name = f"r{next(NUMBERS)}"
            engine.add_request(name, given_, params)
            asked[name] = (index, prompt, count)
        elif move == "steps":
            for _ in range(what[0]):
                _take(engine, found)
        elif move == "gives up" and asked:
            name = [*asked][what[0] % len(asked)]
            engine.abort_request(name)
            if name not in found:
                del asked[name]
        elif move in ("loads", "unloads"):
            request = adapters.requests[what[0]]
            assert request is not None
            if move == "loads":
                engine.call("load_adapter", request.name, request.path, request.revision)
            else:
                engine.call("unload_adapter", request.identity)  # not, where somebody uses it
    while engine.has_unfinished_requests() or engine.stats().num_running:
        _take(engine, found)
    assert found.keys() >= asked.keys()
    for name, (index, prompt, count) in asked.items():
        assert found[name] == adapters.expected[index][prompt][:count], f"another than alone: {asked[name]}"
    assert engine.stats().num_waiting == 0
    for request in adapters.requests[1:]:
        assert request is not None and engine.call("unload_adapter", request.identity), "somebody still uses it"


def _take(engine: Any, found: dict[str, list[int]]) -> None:
    for output in engine.step():
        if output.finished:
            assert output.error is None, output.error
            found[output.request_id] = list(output.outputs[0].token_ids)


def test_afterwards_all_are_as_before(adapters: Adapters, llm: LLM) -> None:
    """Behind all of that."""
    for index, request in enumerate(adapters.requests):
        outputs = llm.generate(PROMPTS, GREEDY, lora_request=request, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == adapters.expected[index]
