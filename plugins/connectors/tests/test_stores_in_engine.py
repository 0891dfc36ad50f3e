"""Tokens are the same with a store as without one, whatever becomes of the store; and the store is of use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.errors import EngineError
from engine_connectors.file.folder import FolderDirectory, FolderStore
from engine_kit.prompt_sources import prompt_sources

SETTINGS: dict[str, Any] = {
    "model": "tiny", "dtype": "float64", "block_size": 4, "max_num_seqs": 4, "max_model_len": 128, "num_kv_pages": 100
}  # fmt: skip
BEGIN = "Once upon a time there was a little girl who lived in a house near the big forest with her mother"
PROMPTS = [BEGIN + end for end in (" and", " but one day", ". She", " who")]
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def with_files(path: Path, **options: Any) -> LLM:
    return LLM(**SETTINGS, kv_connector="file", options={"kv_connector": {"path": str(path), **options}})


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS) as llm:
        return tokens(llm)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]) -> Path:
    """A folder that an engine has left."""
    path = tmp_path_factory.mktemp("store")
    with with_files(path) as llm:
        assert tokens(llm) == expected
    return path


class Spy:
    """What stores of this process read: pages that were there, and pages that were not."""

    def __init__(self) -> None:
        self.there = 0
        self.lost = 0
        self.stores: list[FolderStore] = []


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    seen, get = Spy(), FolderStore.get

    def watched(self: FolderStore, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        found = get(self, keys, pages)
        seen.there += found.count(True)
        seen.lost += found.count(False)
        seen.stores.append(self)
        return found

    monkeypatch.setattr(FolderStore, "get", watched)
    return seen


def test_an_engine_finds_what_another_left(filled: Path, expected: list[list[int]], spy: Spy) -> None:
    """Each request loads its prompt's whole blocks; two engines at once, too."""
    with with_files(filled) as first, with_files(filled) as second:
        assert tokens(first) == tokens(second) == expected
        stats = first.llm_engine.stats()
        sources = prompt_sources(stats)
        assert sum(sources.values()) == stats.prompt_tokens and sources["file"] > sources["computed"] > 0
    assert spy.there >= 2 * len(BEGIN.split()) // 4 and not spy.lost


def test_an_engine_of_another_identity_finds_nothing(filled: Path, spy: Spy) -> None:
    other = SETTINGS | {"dtype": "float32"}
    with LLM(**other, kv_connector="file", options={"kv_connector": {"path": str(filled)}}) as llm:
        tokens(llm)
    assert not spy.there and not spy.lost


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def remove(file: Path) -> None:
    """Between the lookup and the load: what is left is a name."""
    file.unlink()


@pytest.mark.parametrize("damage", [cut, flip, remove])
def test_damaged_files_cost_a_computation_and_no_token(
    tmp_path: Path, expected: list[list[int]], spy: Spy, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_files(tmp_path) as llm:
        tokens(llm)
    files = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    for file in files[::2]:
        damage(file)
    if damage is remove:
        monkeypatch.setattr(FolderDirectory, "has", lambda self, keys: [True] * len(keys))
    with with_files(tmp_path) as llm:
        assert tokens(llm) == expected
        stats = llm.llm_engine.stats()
        assert stats.pages_used == 0
        assert (("file", "damaged", 0) in stats.kv_connectors) == (damage is remove)
    assert spy.lost


def test_a_store_that_is_full(tmp_path: Path, expected: list[list[int]]) -> None:
    """The least that may be asked for holds a few of the prompts' blocks."""
    for _ in range(2):
        with with_files(tmp_path, size="1MiB", buffer=1) as llm:
            assert tokens(llm) == expected
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= 1 << 20


def test_aborts_while_pages_are_on_their_way(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come back when the slow store has given them up; others run meanwhile."""
    gate, get = threading.Event(), FolderStore.get

    def slow(self: FolderStore, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        gate.wait()
        return get(self, keys, pages)

    monkeypatch.setattr(FolderStore, "get", slow)
    with with_files(filled) as llm:
        engine = llm.llm_engine
        engine.add_request("waits", PROMPTS[0], PARAMS[0])
        engine.add_request("runs", "A short one", PARAMS[1])
        ended: list[str] = []
        while "runs" not in ended:
            ended += [output.request_id for output in engine.step() if output.finished]
        assert ended == ["runs"]
        engine.abort_request(["waits"])
        gate.set()
        until = time.monotonic() + 20
        while engine.stats().pages_used and time.monotonic() < until:
            engine.step()
        assert engine.stats().pages_used == 0
        assert not engine.has_unfinished_requests()


def test_a_folder_behind_host_memory(filled: Path, expected: list[list[int]], spy: Spy) -> None:
    settings = SETTINGS | {"num_kv_pages": 45}
    options = {"kv_connector": {"path": str(filled)}}
    with LLM(**settings, swap_space="64MiB", kv_connector="host,file", options=options) as llm:
        assert tokens(llm) == expected and spy.there
        read = spy.there
        llm.generate([f"{word} {BEGIN[15:]}" for word in ("A", "B", "C", "D")], PARAMS, use_tqdm=False)
        assert tokens(llm) == expected
        assert spy.there == read, "host memory has it, and is asked first"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"path": "/proc/none"}, "keep pages in /proc/none"), ({"path": "x", "size": "1KiB"}, "size")],
)
def test_what_cannot_be_kept_is_refused_at_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        LLM(**SETTINGS, kv_connector="file", options={"kv_connector": options})


def test_retained_pages_that_had_to_leave_come_back(tmp_path: Path, expected: list[list[int]]) -> None:
    """A request needs nearly all pages, pinned ones too; the next turn finds them in the store, to the same tokens."""
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = SETTINGS | {"num_kv_pages": 1 + 32}
    with LLM(**settings, kv_connector="file", options={"kv_connector": {"path": str(tmp_path)}}) as llm:
        llm.generate([{"prompt": BEGIN, "kv_retention": {"pin": True}}], greedy, use_tqdm=False)
        retained = dict(llm.llm_engine.stats().retained_pages)["pinned"]
        llm.generate([[7, 8, 9, 10] * 31], greedy, use_tqdm=False)
        stats = llm.llm_engine.stats()
        assert dict(stats.retention_events)["given_up"] >= retained - 1 > 3
        before = prompt_sources(stats)["file"]
        (again,) = llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)
        assert again.outputs[0].token_ids == expected[0]
        assert prompt_sources(llm.llm_engine.stats())["file"] >= before + 4 * (retained - 3)


def test_a_conversation_is_brought_back_before_its_next_turn(tmp_path: Path) -> None:
    """It went to the store for want of pages. A request for no tokens loads it, and the next turn finds it."""
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    settings = SETTINGS | {"num_kv_pages": 1 + 32}
    with LLM(**settings) as alone:
        (first,) = alone.generate([BEGIN], greedy, use_tqdm=False)
        said = [*first.prompt_token_ids, *first.outputs[0].token_ids]
        (expected,) = alone.generate([[*said, 65, 66, 67]], greedy, use_tqdm=False)
    with LLM(**settings, kv_connector="file", options={"kv_connector": {"path": str(tmp_path)}}) as llm:
        llm.generate([BEGIN], greedy, use_tqdm=False)
        llm.generate([[7, 8, 9, 10] * 31], greedy, use_tqdm=False)
        before = prompt_sources(llm.llm_engine.stats())
        prompt: Any = {"prompt_token_ids": said, "kv_retention": {"ttl": 60}}
        (warm,) = llm.generate([prompt], SamplingParams(max_tokens=0), use_tqdm=False)
        stats = llm.llm_engine.stats()
        loaded = prompt_sources(stats)["file"] - before["file"]
        assert (warm.outputs[0].token_ids, warm.outputs[0].finish_reason) == ([], "length")
        assert warm.num_cached_tokens == loaded >= len(said) - 5 and stats.pages_used == 0
        assert dict(stats.retained_pages)["0"] >= loaded // 4
        (again,) = llm.generate([[*said, 65, 66, 67]], greedy, use_tqdm=False)
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids
        assert again.num_cached_tokens >= len(said) - 5
        assert prompt_sources(llm.llm_engine.stats())["file"] == before["file"] + loaded, "it was on the device"


def divided(p: LLM, d: LLM) -> list[list[int]]:
    """Tokens of prompts that the first engine has computed when the second, which asks at once, goes on from there."""
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    outputs = p.generate([{"prompt": text, "kv_transfer": ask} for text in PROMPTS], one, use_tqdm=False)
    told = [output.kv_transfer for output in outputs]
    asked = [{"prompt": text, "kv_transfer": params} for text, params in zip(PROMPTS, told, strict=True)]
    found: list[Any] = []
    going = threading.Thread(target=lambda: found.extend(d.generate(asked, PARAMS, use_tqdm=False)))
    going.start()
    p.llm_engine.step()  # the last blocks are written; a server goes on stepping by itself
    going.join(60)
    for output in found:
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 4 * 4, "it was computed again"
    assert d.llm_engine.stats().pages_used == p.llm_engine.stats().pages_used == 0
    return [output.outputs[0].token_ids for output in found]


def test_one_engine_computes_a_prompt_and_another_goes_on_by_the_folder(
    tmp_path: Path, expected: list[list[int]], spy: Spy
) -> None:
    with with_files(tmp_path) as p, with_files(tmp_path) as d:
        assert divided(p, d) == expected
    assert not spy.lost
