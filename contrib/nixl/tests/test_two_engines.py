"""One engine computes prompts, another reads its pages: the tokens are those of one engine, whatever happens."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nixl_here import free_port, why_not

from engine import LLM, SamplingParams
from engine.errors import EngineError
from engine_kit.kv_canary_worker import CanaryWorker

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float64", "max_num_seqs": 4, "block_size": 8}
PROMPTS = [[(7 * i + k) % 200 + 10 for i in range(3 + 19 * k)] for k in range(5)]
PARAMS = [SamplingParams(temperature=0.8 * (k % 2), seed=k, max_tokens=12, ignore_eos=True) for k in range(5)]
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
_numbers = itertools.count()


def engine(driver: str = "nixl", dtype: str = "float64", kv_canary: bool = False, **options: Any) -> LLM:
    named = {"port": free_port(), "timeout": 0.5, "push_timeout": 2.0, **options}
    settings = SETTINGS | {"dtype": dtype, "kv_canary": kv_canary}
    return LLM(**settings, kv_connector=driver, options={"kv_connector": named})


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[LLM, LLM]]:
    with engine(role="prefill") as p, engine(role="decode") as d:
        yield p, d


def prefilled(p: LLM) -> list[dict[str, Any] | None]:
    """What the engine that computed the prompts tells the other."""
    asked = [{"prompt_token_ids": ids, "kv_transfer": ASK} for ids in PROMPTS]
    told = [output.kv_transfer for output in p.generate(asked, ONE, use_tqdm=False)]
    p.llm_engine.step()  # which offers the last one's pages; a server goes on stepping by itself
    return told


def going_on(params: list[Any]) -> list[dict[str, Any]]:
    """What the engine that goes on is asked. It finds nothing that another test has left in its cache."""
    salt = f"test {next(_numbers)}"
    return [
        {"prompt_token_ids": ids, "cache_salt": salt} | ({"kv_transfer": told} if told else {})
        for ids, told in zip(PROMPTS, params, strict=True)
    ]


def answered(d: LLM, params: list[Any]) -> tuple[list[list[int]], list[int]]:
    """The tokens, and how many of each prompt's were not computed."""
    outputs = d.generate(going_on(params), PARAMS, use_tqdm=False)
    return [one.outputs[0].token_ids for one in outputs], [one.num_cached_tokens for one in outputs]


def idle(*engines: LLM) -> None:
    """Nothing is held: all leases are back, as the next steps find."""
    for llm in engines:
        for _ in range(3):
            llm.generate([[1, 2, 3]], ONE, use_tqdm=False)
        assert llm.llm_engine.stats().pages_used == 0


WHOLE = [(len(ids) - 1) // 8 * 8 for ids in PROMPTS]


def test_pages_are_read(two, expected):
    p, d = two
    for _ in range(2):
        assert answered(d, prefilled(p)) == (expected, WHOLE)
    idle(p, d)


def test_pages_are_read_while_the_prompt_is_computed(two, expected):
    p, d = two
    port = d.llm_engine.plan.config.options["kv_connector"]["port"]
    names = [f"push-{next(_numbers)}" for _ in PROMPTS]
    told = [{"do_remote_prefill": True, "push": True, "remote_request_id": name} for name in names]
    place = {"remote_host": "127.0.0.1", "remote_port": port}
    asked = [
        {"prompt_token_ids": ids, "kv_transfer": {**ASK, "push": True, "remote_request_id": name} | place}
        for ids, name in zip(PROMPTS, names, strict=True)
    ]
    found: list[Any] = []
    going = threading.Thread(target=lambda: found.append(answered(d, told)))
    going.start()
    p.generate(asked, ONE, use_tqdm=False)
    p.llm_engine.step()
    going.join(60)
    assert found == [(expected, WHOLE)]
    idle(p, d)


def test_an_engine_that_is_gone(two, expected):
    _, d = two
    with engine() as p:
        told = prefilled(p)
    assert answered(d, told)[0] == expected
    idle(d)


@pytest.mark.parametrize(("driver", "dtype"), [("tcp", "float64"), ("nixl", "float32")])
def test_an_engine_of_another_kind_is_not_believed(two, expected, driver, dtype):
    """Its prompts are computed again."""
    _, d = two
    with engine(driver, dtype) as p:
        assert answered(d, prefilled(p))[0] == expected
    idle(d)


def test_a_backend_that_is_not_there_is_refused_at_start():
    with pytest.raises(EngineError, match=r"backend NONE.*UCX"):
        engine(backend="NONE")


def test_marks_are_read_with_pages_and_a_page_that_was_changed_is_found(expected, monkeypatch):
    """Its prompt is computed again. Who reads has no other means to see it."""
    pools: list[Any] = []
    register = CanaryWorker.register
    monkeypatch.setattr(CanaryWorker, "register", lambda self, pool: (pools.append(pool), register(self, pool))[1])
    with engine(kv_canary=True, role="prefill") as p, engine(kv_canary=True, role="decode") as d:
        for turn, changed in enumerate((False, True)):
            salt = f"turn {turn}"  # of which marks are made: both have to be told
            asked = [{"prompt_token_ids": ids, "cache_salt": salt, "kv_transfer": ASK} for ids in PROMPTS]
            told = [output.kv_transfer for output in p.generate(asked, ONE, use_tqdm=False)]
            p.llm_engine.step()
            if changed:
                with torch.inference_mode():
                    pools[0][1:, 5] ^= 4
            salted = [{**one, "cache_salt": salt} for one in going_on(told)]
            outputs = d.generate(salted, PARAMS, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            counts = {event: n for name, event, n in d.llm_engine.stats().kv_connectors if name == "canary"}
            assert counts["checked"] > 0 and (counts["mismatches"] > 0) is changed
        idle(d)
