"""The engine with attention `block_sparse`, as a user chooses it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("engine_tiny", reason="engine-tiny is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from engine import LLM, SamplingParams
from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.types.errors import OptionsError
from engine_cuda.interpreter import interpreted

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "block_size": 4, "max_model_len": 160}
PATTERN: dict[str, Any] = {"block": 8, "local": 2, "stride": 3, "sinks": 1, "homo_head": False}
PROMPTS = [[1 + (7 * i + 3 * j * j) % 200 for j in range(n)] for i, n in enumerate((90, 9, 61, 33))]
PROMPTS.append(PROMPTS[0][:48] + PROMPTS[2][:20])  # its first blocks are found in the prefix cache, or not
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def sparse(attention: str = "block_sparse", plain: bool = True, pattern: dict[str, Any] = PATTERN, **more: Any) -> LLM:
    return LLM(**SETTINGS | more, attention=attention, options={"attention": {**pattern, "plain": plain}})


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each request by itself, its prompt in one step."""
    with sparse(enable_prefix_caching=False) as llm:
        return [tokens(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"enable_prefix_caching": False}, id="together"),
        pytest.param({"max_num_batched_tokens": 13}, id="in chunks, with a prefix cache"),
        pytest.param({"num_kv_pages": 64, "max_num_batched_tokens": 24}, id="preempted"),
        pytest.param({"num_kv_pages": 64, "swap_space": 1 << 22}, id="swapped", marks=pytest.mark.slow),
        pytest.param({"drafter": "ngram"}, id="with drafts", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, id="over two ranks", marks=pytest.mark.slow),
    ],
)
def test_any_schedule_gives_the_same_tokens(settings: dict[str, Any], alone: list[list[int]]) -> None:
    with sparse(**settings) as llm:
        assert tokens(llm) == alone
        assert tokens(llm) == alone  # what is cached by now is found
        if settings.get("num_kv_pages"):
            assert llm.llm_engine.client.core.scheduler.num_preemptions > 0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_kernels_give_the_same_tokens(alone: list[list[int]]) -> None:
    """A prompt in chunks beside another's decodes; the first tokens, since kernels are interpreted."""
    if not interpreted():
        pytest.skip("on a GPU, the kernels are compared with dense attention")
    short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with sparse(plain=False, max_num_batched_tokens=24) as llm:
        assert tokens(llm, [PROMPTS[1], PROMPTS[3]], short) == [alone[1][:3], alone[3][:3]]


def test_the_pattern_is_at_work(alone: list[list[int]]) -> None:
    """Where all is local, it is full attention; else long rows answer otherwise, and short ones do not."""
    with LLM(**SETTINGS, attention="torch") as llm:
        full = tokens(llm)
    with sparse("full=block_sparse", pattern={"block": 64, "local": 3, "stride": 0, "sinks": 0}) as llm:
        assert tokens(llm) == full
    assert alone != full
    assert alone[1][:6] == full[1][:6]  # of two blocks, all of which are local


def test_it_is_never_chosen_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    found = launch(EngineConfig(model="dummy:tiny", dtype="float32"))
    (attention,) = [one for one in found.selections if one.point == "attention"]
    assert attention.candidate.name != "block_sparse"
    with caplog.at_level(logging.WARNING), sparse():
        assert "block_sparse leaves out keys" in caplog.text


def test_pages_of_other_patterns_are_others() -> None:
    """A store's pages hold what layers below computed of the keys that they saw."""
    formats = set()
    for local in (2, 3):
        options = {"attention": {"local": local}}
        found = launch(EngineConfig(model="dummy:tiny", dtype="float32", attention="block_sparse", options=options))
        formats.add(found.start.worker.layout.groups[0].page_format)
    assert len(formats) == 2 and all(name.startswith("block_sparse-") for name in formats)


def test_what_it_does_not_serve_is_refused() -> None:
    with pytest.raises(OptionsError, match="local: .* greater than or equal to 1"):
        sparse(pattern={"local": 0})
