"""Communicator `custom_allreduce`: its kernels between processes, interpreted; and what it asks the CUDA driver."""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")
pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import compiled

from engine.interfaces.communicator import CommunicatorNeed
from engine_cuda.communicator_custom_allreduce.body import CustomAllReduceBody
from engine_cuda.communicator_custom_allreduce.card import CustomAllReduce
from engine_cuda.communicator_custom_allreduce.kernels import one_shot_kernel, two_shot_kernel
from engine_cuda.communicator_custom_allreduce.layout import BLOCKS, DATA, MOST_RANKS, SEGMENT, STATE, Layout, cut
from engine_cuda.communicator_custom_allreduce.memory import DeviceMemory
from engine_cuda.links import not_linked
from engine_cuda.peers import Peers
from engine_sdk.conformance.communicator import scenarios
from engine_sdk.conformance.communicator.ranks import Ranks
from engine_sdk.conformance.subject import Subject

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def check_sums(ranks: Ranks, size: int, n: int, dtypes: list[str], **options: Any) -> None:
    """Every sum of the suite's scenario, against its definition."""
    subject = Subject.of_card("communicator", CustomAllReduce, options)
    meeting = ranks.meet(subject, CustomAllReduceBody, "collectives", size, n=n, dtypes=dtypes)
    for rank, found in enumerate(meeting.found()):
        wanted = scenarios.expected(rank, size, dtypes, n)
        sums = {key: value for key, value in wanted.items() if key.startswith("all_reduce")}
        for key, value in sums.items():
            assert torch.equal(found[key], value), f"{key} on rank {rank}"
        assert all(found[key] is None for key in wanted.keys() - sums.keys())


@interpreted
@pytest.mark.xdist_group("communicators")
def test_four_ranks_in_two_shots(ranks: Ranks) -> None:
    """Parts that fill no segment, several programs; small ones in one shot between them."""
    check_sums(ranks, 4, 10_007, ["bfloat16"], one_shot_bytes=64)


@interpreted
@pytest.mark.slow
@pytest.mark.xdist_group("communicators")
def test_eight_ranks(ranks: Ranks) -> None:
    """Of each dtype, in both ways, over more than a round of all programs."""
    check_sums(ranks, 8, 2003, ["float32", "bfloat16", "float16"])
    check_sums(ranks, 8, 2003, ["float32", "bfloat16", "float16"], one_shot_bytes=64)
    check_sums(ranks, 2, 140_003, ["float32"])
    check_sums(ranks, 2, 140_003, ["bfloat16"], one_shot_bytes=1)


@interpreted
@pytest.mark.slow
@pytest.mark.xdist_group("communicators")
def test_one_shot_and_two_in_turn(ranks: Ranks) -> None:
    """Without a pause, in every order of sizes: slots and signals of one way are not taken for those of the other."""
    subject = Subject.of_card("communicator", CustomAllReduce, {"one_shot_bytes": 4000})
    for size in (2, 4):
        assert ranks.meet(subject, CustomAllReduceBody, "rounds", size, turns=80).found() == [0] * size


def test_how_tensors_are_cut() -> None:
    """All of them is summed, no program starts without work, no part is larger than its slot."""
    for size in (2, 4, 8):
        layout = Layout(size)
        assert layout.results + BLOCKS * SEGMENT <= layout.nbytes and layout.nbytes % (2 << 20) == 0
        for itemsize in (2, 4):
            for count in (1, 5, 2048, 2049, 131_072, 1_000_003, 4 << 20):
                for one_shot_bytes in (0, 1 << 30):
                    how = cut(count, itemsize, size, one_shot_bytes)
                    tile = how.block * (1 if how.one_shot else size)
                    assert tile * itemsize <= layout.slot and how.one_shot == (count * itemsize <= one_shot_bytes)
                    assert 1 <= how.programs <= BLOCKS and (how.programs - 1) * tile < count
                    assert how.programs == BLOCKS or how.programs * tile >= count


def test_the_card() -> None:
    def reasons(**fields: Any) -> str:
        need = {"world_size": 2, "device": "cpu"} | fields
        return "; ".join(CustomAllReduce.unsupported(CommunicatorNeed(**need)))

    assert "3 ranks are not one of 2, 4, 8" in reasons(world_size=3)
    assert "meta" in reasons(device="meta")
    if not torch.cuda.is_available():
        assert reasons() == "" and "no GPU" in reasons(device="cuda")


# -- drivers and links that are made up --------------------------------------------------------------------------------
class Links:
    """A CUDA driver that knows `count` GPUs, and which attributes pairs of them have."""

    def __init__(self, count: int, has: Any) -> None:
        self._count = count
        self._has = has

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self._count
        return 0

    def cuDeviceGet(self, out: Any, place: Any) -> int:
        out._obj.value = place.value
        return 0

    def cuDeviceGetP2PAttribute(self, out: Any, attribute: Any, first: Any, second: Any) -> int:
        out._obj.value = self._has(attribute.value, first.value, second.value)
        return 0


def test_links() -> None:
    assert not_linked(8, Links(8, lambda *_: True)) == []
    assert not_linked(2, Links(1, lambda *_: False)) == [], "two ranks on one GPU need no link"
    assert "cannot see" in not_linked(4, Links(4, lambda attribute, a, b: (a, b) != (2, 1)))[0]
    assert "NVLink" in not_linked(4, Links(4, lambda attribute, a, b: attribute == 2 or a + b < 4))[0]
    assert not_linked(2, Links(4, lambda attribute, a, b: a < 2 and b < 2)) == [], (
        "those that are not used may be apart"
    )


class Driver:
    """A CUDA driver whose device is the processor's memory; rank `broken` cannot open what others show."""

    def __init__(self, rank: int, broken: int = -1) -> None:
        self._rank = rank
        self._broken = broken
        self.kept = list[Any]()
        self.calls = list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in ("cuCtxGetCurrent", "cuStreamCreate"):
                arguments[0]._obj.value = 1
            if name == "cuMemAlloc_v2":
                self.kept.append(ctypes.create_string_buffer(b"\xff" * arguments[1].value, arguments[1].value))
                arguments[0]._obj.value = ctypes.addressof(self.kept[-1])
            if name == "cuMemHostAlloc":
                self.pinned = ctypes.create_string_buffer(arguments[1].value)
                arguments[0]._obj.value = ctypes.addressof(self.pinned)
            if name == "cuMemcpyHtoDAsync_v2":
                ctypes.memmove(arguments[0].value, arguments[1].value, arguments[2].value)
            if name == "cuIpcGetMemHandle":
                ctypes.memmove(ctypes.addressof(arguments[0]._obj), ctypes.addressof(arguments[1]), 8)
            if name == "cuIpcOpenMemHandle_v2":
                if self._rank == self._broken:
                    return 201
                ctypes.memmove(ctypes.addressof(arguments[0]._obj), ctypes.addressof(arguments[1]), 8)
            if name == "cuMemsetD8_v2":
                ctypes.memset(arguments[0].value, arguments[1].value, arguments[2].value)
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"invalid device context"
            return 0

        return call


@pytest.mark.parametrize("broken", [-1, 1])
def test_memory_of_devices(broken: int) -> None:
    """Handles reach everybody; where one rank cannot open them, all know why."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as threads:

        def rank(number: int) -> tuple[Any, Driver]:
            peers, driver = Peers(folder, "memory", number, 3, 20.0), Driver(number, broken)
            try:
                memory = DeviceMemory(DATA + 100, number, peers.exchange, driver)
            except RuntimeError as error:
                return str(error), driver
            finally:
                peers.close()
            own = driver.kept[0]
            assert not any(own.raw[:DATA]) and any(own.raw[DATA:])
            memory.release()
            assert set(own.raw[:STATE]) == {0x7F} and not any(own.raw[STATE:DATA])
            found = memory.addresses
            memory.close()
            memory.close()
            return found, driver

        found = [future.result(30) for future in [threads.submit(rank, r) for r in range(3)]]
    if broken < 0:
        addresses = [ctypes.addressof(driver.kept[0]) for _, driver in found]
        assert [answer for answer, _ in found] == [addresses] * 3
        assert all(driver.calls.count("cuIpcCloseMemHandle") == 2 for _, driver in found)
    else:
        assert {answer for answer, _ in found} == {
            "rank 1: rank 0's memory: cuIpcOpenMemHandle_v2: invalid device context"
        }
    for ends in ("cuMemFree_v2", "cuMemFreeHost"):
        assert all(driver.calls.count(ends) == 1 for _, driver in found)


# -- compiled ----------------------------------------------------------------------------------------------------------
def case(size: int, block: int, warps: int, target: str = "sm_90", one_shot: bool = True) -> compiled.Case:
    layout = Layout(size)
    constants: dict[str, Any] = {
        "RANK": 1, "WORLD": size, "BLOCK": block, "SLOT": layout.slot, "STATE": STATE, "DATA": DATA,
        "MOST_RANKS": MOST_RANKS,
    }  # fmt: skip
    if not one_shot:
        constants |= {"RESULTS": layout.results, "SEGMENT": SEGMENT}
    signature = {"x": "*bf16", "out": "*bf16", "peers": "*i64", "count": "i32"}
    kernel = one_shot_kernel if one_shot else two_shot_kernel
    return compiled.Case(kernel, signature, constants, target, warps, multiples_of_16=("count",))


def check_compiled(found: compiled.Compiled) -> None:
    """Whole words of memory, signals for the whole machine, and nothing between threads in the loop that waits."""
    assert found.spilled == 0 and found.registers <= 96
    assert "ld.global.v4.b32" in found.assembly and "ld.global.b16" not in found.assembly
    assert "atom.global.sys.release.exch.b64" in found.assembly
    waits = re.findall(r"again:(.*?)bra again;", found.assembly, re.DOTALL)
    assert waits and all("ld.acquire.sys.global.b64" in body for body in waits)
    assert not any(word in body for body in waits for word in ("bar.sync", "shfl", "st.global"))
    ahead = re.findall(
        r"%tid\.x;\s+mov\.b64\s+flag, \S+;\s+setp\.ge\.u32\s+other, thread, 32;\s+@other bra done;", found.assembly
    )
    assert len(ahead) == len(waits), "one warp of a program waits"
    order = re.findall(r"bar\.sync|release\.exch|bra again|ld\.global\.v4", found.assembly)
    letters = {"bar.sync": "b", "release.exch": "r", "bra again": "w", "ld.global.v4": "l"}
    after = "".join(letters[word] for word in order)
    assert after.count("brwb") == len(waits), f"each signal and wait stands between two barriers: {after}"


def test_it_compiles() -> None:
    """For four ranks: the loop over them is unrolled, and eight take the compiler three times as long."""
    check_compiled(compiled.compile_all([case(4, 2048, 8)])[0])


@pytest.mark.slow
def test_all_forms_compile() -> None:
    cases = []
    for target in ("sm_80", "sm_90", "sm_100"):
        for size in (2, 4, 8):
            cases += [case(size, 2048, 8, target), case(size, 8192, 16, target)]
            cases += [case(size, 4096, 16, target, one_shot=False)]
    for found in compiled.compile_all(cases):
        check_compiled(found)
