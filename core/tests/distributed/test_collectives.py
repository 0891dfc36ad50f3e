"""Every installed communicator against numpy: all collectives, dtypes, uneven and strided parts; and the group."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import communicators, on_ranks

from engine.distributed.group import ProcessGroup
from engine.interfaces.communicator import Communicator, CommunicatorNeed
from engine.types.errors import ConfigError, EngineError
from engine_reference.communicator_gloo.card import GlooCommunicator
from engine_reference.communicator_gloo.gloo import DTYPES

SIZES = (2, 3, 4)
DRIVERS = communicators()
each_driver = pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)


def whole_numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Small ones: every dtype adds them up exactly."""
    return np.random.default_rng(seed).integers(0, 9, shape)


@each_driver
@pytest.mark.parametrize("size", SIZES)
def test_all_collectives_in_every_dtype(driver: type, size: int) -> None:
    """One meeting for all of them: whatever comes out, numpy says the same."""
    lengths = [3 + rank for rank in range(size)]  # uneven parts along a dimension
    total = sum(lengths)
    counts = np.array([[(r + 2 * c) % 3 for c in range(size)] for r in range(size)])  # rows from r to c, some none

    def given(rank: int, name: str) -> np.ndarray:
        shape = {"sum": (5, 7), "gather0": (lengths[rank], 4), "gather1": (2, lengths[rank]), "scatter": (2, total),
                 "all": (int(counts[rank].sum()), 3), "one": (6,)}[name]  # fmt: skip
        return whole_numbers(shape, seed=100 * rank + len(name))

    def work(rank: int, communicator: Communicator) -> dict[Any, Any]:
        group, found = ProcessGroup(rank, size, [communicator]), {}
        with torch.inference_mode():
            for dtype in sorted(DTYPES, key=str):

                def mine(name: str, dtype: torch.dtype = dtype) -> torch.Tensor:
                    return torch.from_numpy(given(rank, name)).to(dtype)

                found[dtype, "sum"] = group.all_reduce(mine("sum"))
                found[dtype, "strided"] = group.all_reduce(mine("sum").T)
                found[dtype, "gather0"] = group.all_gather(mine("gather0"), 0, lengths)
                found[dtype, "gather1"] = group.all_gather(mine("gather1"), -1, lengths)
                found[dtype, "even"] = group.all_gather(mine("sum"))
                found[dtype, "scatter"] = group.reduce_scatter(mine("scatter"), 1, lengths)
                found[dtype, "all"] = group.all_to_all(mine("all"), counts[rank].tolist(), counts[:, rank].tolist())
                found[dtype, "one"] = mine("one")
                group.broadcast(found[dtype, "one"], root=size - 1)
                found[dtype, "column"] = mine("sum")
                group.broadcast(found[dtype, "column"][:, 2], root=1)
                found[dtype, "sent"] = mine("one")
                if rank == 0:
                    group.send(found[dtype, "sent"], 1)
                elif rank == 1:
                    group.recv(found[dtype, "sent"], 0)
            group.barrier()
        return found

    answers = on_ranks(driver, size, work)
    starts = np.cumsum([0, *lengths])
    for rank, found in enumerate(answers):
        column = given(rank, "sum")
        column[:, 2] = given(1, "sum")[:, 2]
        expected = {
            "sum": sum(given(r, "sum") for r in range(size)),
            "strided": sum(given(r, "sum") for r in range(size)).T,
            "gather0": np.concatenate([given(r, "gather0") for r in range(size)]),
            "gather1": np.concatenate([given(r, "gather1") for r in range(size)], axis=1),
            "even": np.concatenate([given(r, "sum") for r in range(size)]),
            "scatter": sum(given(r, "scatter") for r in range(size))[:, starts[rank] : starts[rank + 1]],
            "all": np.concatenate(
                [given(r, "all")[counts[r, :rank].sum() : counts[r, : rank + 1].sum()] for r in range(size)]
            ),
            "one": given(size - 1, "one"),
            "column": column,
            "sent": given(0 if rank == 1 else rank, "one"),
        }
        for dtype in DTYPES:
            for name, value in expected.items():
                got = found[dtype, name]
                assert got.dtype == dtype
                np.testing.assert_array_equal(got.double().numpy(), value, err_msg=f"{name} in {dtype} on rank {rank}")


@each_driver
@pytest.mark.parametrize("size", SIZES)
def test_sums_have_the_same_bits_on_every_rank(driver: type, size: int) -> None:
    """What sampling on every rank rests on. In float64 they are numpy's but for rounding."""
    parts = [np.random.default_rng(rank).standard_normal((33, 17)) for rank in range(size)]

    def work(rank: int, communicator: Communicator) -> list[torch.Tensor]:
        x = torch.from_numpy(parts[rank])
        return [
            communicator.all_reduce(x.to(dtype, copy=True)) for dtype in (torch.float64, torch.float32, torch.bfloat16)
        ]

    first, *others = on_ranks(driver, size, work)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    np.testing.assert_allclose(first[0].numpy(), sum(parts), rtol=0, atol=1e-14)


@each_driver
def test_what_is_sent_ahead(driver: type) -> None:
    """In order; and before the other rank asks for it, where the driver can: `isend`."""
    ahead = threading.Event()

    def work(rank: int, communicator: Communicator) -> list[torch.Tensor]:
        group = ProcessGroup(rank, 2, [communicator])
        tensors = [torch.full((70_001,), float(n + 1) * (rank == 0)) for n in range(3)]
        if rank == 0:
            sendings = [group.isend(tensor, 1) for tensor in tensors]
            ahead.set()
            for sending in sendings:
                if sending is not None:
                    sending.wait()
        else:
            assert ahead.wait(30) or not hasattr(driver, "isend"), "it waits for the other rank"
            for tensor in tensors:
                group.recv(tensor, 0)
        return tensors

    if not hasattr(driver, "isend"):
        ahead.set()
    sent, received = on_ranks(driver, 2, work)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


@each_driver
@pytest.mark.parametrize("size", SIZES)
def test_large_tensors(driver: type, size: int) -> None:
    """Over a megabyte, and of no round number: whatever a driver cuts it into."""
    lengths = [100_003 + 7 * rank for rank in range(size)]
    counts = np.array([[20_001 * ((r + c) % 3) for c in range(size)] for r in range(size)])

    def given(rank: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(whole_numbers(shape, seed=rank)).to(torch.float32)

    def work(rank: int, communicator: Communicator) -> list[torch.Tensor]:
        group, sent = ProcessGroup(rank, size, [communicator]), given(rank, 123_457)
        if rank < 2:
            group.send(sent, 1) if rank == 0 else group.recv(sent, 0)
        whole = given(rank, 300_001)
        group.broadcast(whole, root=1)
        return [
            group.all_reduce(given(rank, 300_001)),
            group.all_gather(given(rank, 3, lengths[rank]), 1, lengths),
            group.reduce_scatter(given(rank, 3, sum(lengths)), 1, lengths),
            group.all_to_all(given(rank, int(counts[rank].sum()), 3), counts[rank].tolist(), counts[:, rank].tolist()),
            whole,
            sent,
        ]

    total = sum(given(r, 3, sum(lengths)) for r in range(size))
    for rank, found in enumerate(on_ranks(driver, size, work)):
        expected = [
            sum(given(r, 300_001) for r in range(size)),
            torch.cat([given(r, 3, lengths[r]) for r in range(size)], 1),
            total.split(lengths, 1)[rank],
            torch.cat([given(r, int(counts[r].sum()), 3).split(counts[r].tolist())[rank] for r in range(size)]),
            given(1, 300_001),
            given(0 if rank == 1 else rank, 123_457),
        ]
        for index, (got, value) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(got, value), f"number {index} on rank {rank}"


@each_driver
def test_empty_tensors(driver: type) -> None:
    def work(rank: int, communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        return communicator.all_reduce(torch.empty(0, 3)), communicator.all_gather(torch.empty(0, 3), 1, [3, 3])

    for reduced, gathered in on_ranks(driver, 2, work):
        assert (reduced.shape, gathered.shape) == ((0, 3), (0, 6))


@each_driver
def test_a_rank_that_goes_is_an_error_for_the_others(driver: type) -> None:
    def work(rank: int, communicator: Communicator) -> str:
        if rank == 1:
            communicator.close()
            communicator.close()
            with pytest.raises(RuntimeError, match="closed"):
                communicator.barrier()
            return ""
        with pytest.raises(RuntimeError) as caught:
            communicator.all_reduce(torch.ones(3))
        return str(caught.value)

    assert on_ranks(driver, 2, work)[0]


# -- the group -------------------------------------------------------------------------------------------------------
class Picky:
    """Takes sums of some shapes and nothing else; counts what it is asked."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.asked = 0
        self.closed = 0

    def accepts(self, op: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
        self.asked += 1
        return op == "all_reduce" and shape in self.shapes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + len(self.shapes)

    def close(self) -> None:
        self.closed += 1


def test_the_first_that_accepts_takes_it_and_is_asked_once() -> None:
    small, large = Picky({(2,)}), Picky({(2,), (3,)})
    group = ProcessGroup(0, 2, [small, large])  # type: ignore[list-item]
    for _ in range(3):
        assert group.all_reduce(torch.zeros(2)).tolist() == [1, 1]
        assert group.all_reduce(torch.zeros(3)).tolist() == [2, 2, 2]
    assert (small.asked, large.asked) == (2, 1)
    with pytest.raises(EngineError, match=r"all_reduce of \[4\] in torch.float32 over 2 ranks; no communicator"):
        group.all_reduce(torch.zeros(4))
    with pytest.raises(EngineError, match="barrier"):
        group.barrier()
    group.close()
    assert (small.closed, large.closed) == (1, 1)


def test_one_rank_needs_nobody() -> None:
    group, x = ProcessGroup(0, 1), torch.ones(4, 2)
    assert group.all_reduce(x) is x and group.all_gather(x) is x and group.reduce_scatter(x) is x
    assert group.all_to_all(x, [4], [4]) is x
    group.broadcast(x)
    group.barrier()
    group.close()
    assert (group.rank, group.size) == (0, 1)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (2, 2), (-1, 1)])
def test_groups_that_cannot_be(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} of a group of {size}"):
        ProcessGroup(rank, size)


def test_card() -> None:
    assert GlooCommunicator.unsupported(CommunicatorNeed(world_size=2, device="cpu")) == []
    need = CommunicatorNeed(world_size=1, device="cuda:0")
    reasons = GlooCommunicator.unsupported(need)
    for word, reason in zip(("nobody", "cuda:0"), reasons, strict=True):
        assert word in reason
