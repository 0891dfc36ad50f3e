"""One engine computes prompts, another goes on from its pages, over loopback: the tokens are those of one engine."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from loopback import free_port

from engine import LLM, SamplingParams
from engine.types.errors import ConfigError
from engine.types.kv import KVLayout
from engine.types.parallel import Place
from engine_connectors.tcp.card import TCPOptions
from engine_connectors.tcp.exchange import Exchange
from engine_connectors.tcp.messages import WHOLE, Data, Lacking
from engine_connectors.tcp.worker_half import TCPWorker

SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float64", "max_num_seqs": 4, "block_size": 8}
PROMPTS = [[(7 * i + k) % 200 + 10 for i in range(3 + 19 * k)] for k in range(5)]
PARAMS = [SamplingParams(temperature=0.8 * (k % 2), seed=k, max_tokens=12, ignore_eos=True) for k in range(5)]
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


def engine(**options: Any) -> LLM:
    named = {f"kv_connector.{name}": value for name, value in {"port": free_port(), **options}.items()}
    return LLM(**SETTINGS, kv_connector="tcp", **named)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS) as llm:
        return tokens(llm, PROMPTS)


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[LLM, LLM]]:
    with engine(role="prefill") as p, engine(role="decode", timeout=0.5, push_timeout=2.0) as d:
        yield p, d


def tokens(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


def prefilled(p: LLM, prompts: list[list[int]], salt: str = "", **more: Any) -> list[dict[str, Any] | None]:
    """What the engine that computed these tells the other."""
    asked = [{"prompt_token_ids": ids, "cache_salt": salt, "kv_transfer": {**ASK, **more}} for ids in prompts]
    told = [output.kv_transfer for output in p.generate(asked, ONE, use_tqdm=False)]
    p.llm_engine.step()  # which offers the last one's pages; a server goes on stepping by itself
    return told


def going_on(prompts: list[list[int]], params: list[Any], salt: str = "") -> list[dict[str, Any]]:
    """What the engine that goes on is asked. It finds nothing that another test has left in its cache."""
    salt = salt or f"test {next(_numbers)}"
    return [
        {"prompt_token_ids": ids, "cache_salt": salt} | ({"kv_transfer": told} if told else {})
        for ids, told in zip(prompts, params, strict=True)
    ]


_numbers = itertools.count()


def idle(*engines: LLM) -> None:
    """Nothing is held: all leases are back, as the next steps find."""
    for llm in engines:
        for _ in range(3):
            llm.generate([[1, 2, 3]], ONE, use_tqdm=False)
        assert llm.llm_engine.stats().pages_used == 0


def test_tokens_are_those_of_one_engine_and_nothing_stays(two, expected):
    p, d = two
    told = prefilled(p, PROMPTS)
    assert told[0] is None, "no whole block, nothing to transfer"
    assert all(one["do_remote_prefill"] and one["remote_block_ids"] for one in told[1:])
    outputs = d.generate(going_on(PROMPTS, told), PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for ids, output in zip(PROMPTS, outputs, strict=True):
        assert output.num_cached_tokens == (len(ids) - 1) // 8 * 8, "the prompt was computed again"
    idle(p, d)


def test_pages_that_the_other_engine_has_are_let_go(two, expected):
    p, d = two
    asked = going_on(PROMPTS, prefilled(p, PROMPTS))
    assert tokens(d, asked) == expected
    again = [
        one | ({"kv_transfer": told} if told else {}) for one, told in zip(asked, prefilled(p, PROMPTS), strict=True)
    ]
    assert tokens(d, again) == expected
    d.llm_engine.step()
    idle(p, d)


def ahead(p: LLM, d: LLM, way: str) -> list[Any]:
    """What the engine that goes on answers, where it waits while the prompts are computed."""
    names = [f"{way}-{next(_numbers)}" for _ in PROMPTS]
    told = [{"do_remote_prefill": True, way: True, "remote_request_id": name} for name in names]
    salt = f"of {next(_numbers)}"  # so that nothing is in the first one's cache
    asked = [
        {"prompt_token_ids": ids, "cache_salt": salt, "kv_transfer": {**ASK, way: True, "remote_request_id": name}}
        for ids, name in zip(PROMPTS, names, strict=True)
    ]
    for one in told if way == "follow" else [one["kv_transfer"] for one in asked]:
        one |= _at((p if way == "follow" else d).llm_engine.plan.config.options["kv_connector"]["port"])
    found: list[Any] = []
    going = threading.Thread(
        target=lambda: found.extend(d.generate(going_on(PROMPTS, told, salt), PARAMS, use_tqdm=False))
    )
    going.start()
    p.generate(asked, ONE, use_tqdm=False)
    p.llm_engine.step()
    going.join(60)
    return found


@pytest.mark.parametrize("way", ["push", "follow"])
def test_pages_travel_while_the_prompt_is_computed(two, expected, monkeypatch, way):
    """Whichever begins; and all that a step has computed goes layer by layer."""
    p, d = two
    tell, frames = Exchange._tell, Counter[bool]()

    def instead(self, link, message, parts=()):
        if isinstance(message, Data):
            frames[message.part == WHOLE] += 1
        return tell(self, link, message, parts)

    monkeypatch.setattr(Exchange, "_tell", instead)
    found = ahead(p, d, way)
    assert [output.outputs[0].token_ids for output in found] == expected
    assert [output.num_cached_tokens for output in found] == [(len(ids) - 1) // 8 * 8 for ids in PROMPTS]
    assert frames[False] and not frames[True], "pages were read as a whole when all was computed"
    idle(p, d)


@pytest.fixture(scope="module")
def marked() -> Iterator[tuple[LLM, LLM]]:
    named = {"kv_connector": "tcp", "kv_canary": True, "kv_connector.push_timeout": 2.0}
    with (
        LLM(**SETTINGS, **named, **{"kv_connector.port": free_port()}) as p,
        LLM(**SETTINGS, **named, **{"kv_connector.port": free_port()}) as d,
    ):
        yield p, d


def canary(llm: LLM) -> dict[str, int]:
    return {event: count for driver, event, count in llm.llm_engine.stats().kv_connectors if driver == "canary"}


@pytest.mark.parametrize("way", ["push", *(pytest.param(way, marks=pytest.mark.slow) for way in ("pull", "follow"))])
def test_marks_travel_and_a_layer_that_was_changed_before_it_went_is_found(marked, expected, monkeypatch, way):
    """Frames' own checksums cannot see it: what is sent is what they tell of."""
    p, d = marked
    fill, whole = Exchange._fill, list[Any]()
    monkeypatch.setattr(Exchange, "_fill", lambda self, *args: (whole.append(args), fill(self, *args))[1])

    def going() -> list[list[int]]:
        if way == "pull":
            salt = f"of {next(_numbers)}"  # which marks are made of
            return tokens(d, going_on(PROMPTS, prefilled(p, PROMPTS, salt), salt))
        return [output.outputs[0].token_ids for output in ahead(p, d, way)]

    before = canary(d)
    assert going() == expected
    after = canary(d)
    assert after["mismatches"] == before["mismatches"] and after["checked"] > before["checked"]
    assert bool(whole) is (way == "pull"), "marks go behind layers, and with pages"
    if way != "pull":
        stage = Exchange.stage

        def instead(self, chunk, table, part, first, content):
            content = content.copy()
            if part == 1:
                content[0, 5] ^= 4
            stage(self, chunk, table, part, first, content)

        monkeypatch.setattr(Exchange, "stage", instead)
        assert going() == expected
        assert canary(d)["mismatches"] > after["mismatches"] and not canary(p)["mismatches"]
    idle(p, d)


def _at(port: int) -> dict[str, Any]:
    return {"remote_host": "127.0.0.1", "remote_port": port}


@pytest.mark.parametrize("what", ["lost", "damaged", "doubled", "gone"])
@pytest.mark.parametrize("often", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_whatever_happens_to_frames_the_tokens_are_right(two, expected, monkeypatch, what, often):
    p, d = two
    tell, numbers = Exchange._tell, itertools.count()

    def instead(self, link, message, parts=()):
        if not isinstance(message, Data) or next(numbers) % often:
            return tell(self, link, message, parts)
        if what == "damaged":
            parts = [bytes(len(memoryview(part).cast("B"))) for part in parts]
        elif what == "gone":
            message, parts = Lacking(message.transfer, message.question, message.blocks), ()
        for _ in range({"lost": 0, "doubled": 2}.get(what, 1)):
            tell(self, link, message, parts)
        return None

    told = prefilled(p, PROMPTS)

    monkeypatch.setattr(Exchange, "_tell", instead)
    assert tokens(d, going_on(PROMPTS, told)) == expected
    monkeypatch.undo()
    idle(p, d)
    if what == "damaged":
        [seen] = [count for _, event, count in d.llm_engine.stats().kv_connectors if event == "damaged"]
        assert seen > 0


def test_an_engine_that_is_gone_before_its_pages_were_fetched(two, expected):
    _, d = two
    with engine() as p:
        told = prefilled(p, PROMPTS)
    assert tokens(d, going_on(PROMPTS, told)) == expected
    idle(d)


def test_pages_whose_lease_has_run_out(two, expected):
    _, d = two
    with engine(lease_seconds=0.1) as p:
        told = prefilled(p, PROMPTS)
        time.sleep(0.15)
        idle(p)
        assert tokens(d, going_on(PROMPTS, told)) == expected
        idle(d)


@pytest.mark.parametrize("way", ["pull", "push", "follow"])
@pytest.mark.parametrize(
    "change", [{"dtype": "float32"}, pytest.param({"block_size": 16}, marks=pytest.mark.slow)], ids=str
)
def test_another_model_is_not_believed(two, expected, change, way):
    """Another dtype, or another page size, whoever begins: the prompt is computed, and nothing is held."""
    _, d = two
    port = free_port()
    with LLM(**{**SETTINGS, **change}, kv_connector="tcp", **{"kv_connector.port": port}) as p:
        if way == "pull":
            told = prefilled(p, PROMPTS)
        else:
            names = [f"{way}-{next(_numbers)}" for _ in PROMPTS]
            told = [{"do_remote_prefill": True, way: True, "remote_request_id": name} for name in names]
            theirs = [{**ASK, way: True, "remote_request_id": name} for name in names]
            to = port if way == "follow" else d.llm_engine.plan.config.options["kv_connector"]["port"]
            for one in told if way == "follow" else theirs:
                one |= _at(to)
            asked = [{"prompt_token_ids": ids, "kv_transfer": one} for ids, one in zip(PROMPTS, theirs, strict=True)]
            p.generate(asked, ONE, use_tqdm=False)
            p.llm_engine.step()
        assert tokens(d, going_on(PROMPTS, told)) == expected
        idle(d, p)


@pytest.mark.slow
def test_two_ranks_on_each_side_and_another_number_of_them(two, expected):
    """Each rank's pages go to the same rank; where there are more or fewer, prompts are computed."""
    more = {**SETTINGS, "tensor_parallel_size": 2, "kv_connector": "tcp"}
    with LLM(**more, **{"kv_connector.port": free_port()}) as p:
        assert tokens(two[1], going_on(PROMPTS, prefilled(p, PROMPTS))) == expected
        with LLM(**more, **{"kv_connector.port": free_port()}) as d:
            outputs = d.generate(going_on(PROMPTS, prefilled(p, PROMPTS)), PARAMS, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert [output.num_cached_tokens for output in outputs] == [(len(ids) - 1) // 8 * 8 for ids in PROMPTS]
            idle(p, d)


def test_several_cores_of_one_server_are_refused():
    layout, place = KVLayout(block_size=8, page_bytes=16, tables=(), groups=()), Place()
    start = SimpleNamespace(data_parallel_size=2, layout=layout, place=place)
    with pytest.raises(ConfigError, match="start a server for each core"):
        TCPWorker(SimpleNamespace(options=TCPOptions(), start=start)).register(None)
