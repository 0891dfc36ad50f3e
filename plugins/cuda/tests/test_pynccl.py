"""Communicator `pynccl`: what it asks NCCL for, with gloo in NCCL's place; and on GPUs, where there are some."""

from __future__ import annotations

import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")

from nccl_on_gloo import Bindings, NCCLError, PyNcclOnGloo
from nccl_on_gloo_card import OnGloo

from engine.interfaces.communicator import CommunicatorNeed
from engine_cuda.communicator_pynccl import card
from engine_cuda.communicator_pynccl.body import SUMMED
from engine_cuda.communicator_pynccl.card import PyNccl, PyNcclOptions
from engine_cuda.communicator_pynccl.library import Nccl
from engine_sdk.conformance import CommunicatorConformance
from engine_sdk.conformance.communicator import scenarios
from engine_sdk.conformance.communicator.ranks import Ranks
from engine_sdk.conformance.subject import Subject


@pytest.mark.slow
@pytest.mark.xdist_group("communicators")
class TestOnGloo(CommunicatorConformance):
    """The whole suite, but for NCCL itself."""

    card = OnGloo

    def test_figure(self) -> None:
        """How fast gloo is says nothing."""


@pytest.mark.gpu
@pytest.mark.xdist_group("communicators")
class TestPyNccl(CommunicatorConformance):
    """A GPU for each rank: with fewer the card says so, and nothing is known."""

    driver, device = "pynccl", "cuda"


@pytest.mark.xdist_group("communicators")
def test_every_collective() -> None:
    """Between three processes, over even and uneven parts, each dimension, every root."""
    ranks, dtypes = Ranks(), ["bfloat16", "int64"]
    try:
        subject = Subject.of_card("communicator", OnGloo, {})
        meeting = ranks.meet(subject, PyNcclOnGloo, "collectives", 3, n=11, dtypes=dtypes)
    finally:
        ranks.close()
    for rank, found in enumerate(meeting.found()):
        for key, value in scenarios.expected(rank, 3, dtypes, 11).items():
            assert torch.equal(found[key], value), f"{key} on rank {rank}"


def joined(bindings: Any, timeout: float = 5.0, gone: Any = lambda: None) -> Nccl:
    return Nccl(0, 1, lambda data: [data], lambda: None, gone, timeout, bindings)


def test_a_rank_alone() -> None:
    """Every collective of a group of one, by its addresses and counts; then an error that comes later, and the end."""
    with tempfile.TemporaryDirectory() as folder:
        bindings = Bindings(folder, 0, 1)
        nccl = joined(bindings)
        x, out = torch.arange(5.0), torch.zeros(5)
        nccl.call("all_gather", x.data_ptr(), out.data_ptr(), x.nbytes, 1, stream=7)
        assert torch.equal(x, out)
        bindings.comm_get_async_error = lambda comm: 6  # type: ignore[method-assign]
        bindings.get_error_string = lambda code: f"remote error {code}"  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="remote error 6"):
            nccl.check()
        nccl.abort("rank 3 has gone")
        nccl.abort("again")
        with pytest.raises(RuntimeError, match="rank 3 has gone"):
            nccl.call("all_gather", x.data_ptr(), out.data_ptr(), x.nbytes, 1, stream=7)


def test_starts_that_fail() -> None:
    """NCCL refuses, ranks do not come, or go: an error soon, and no wait without end."""
    with tempfile.TemporaryDirectory() as folder:
        bindings, forever = Bindings(folder, 0, 1), threading.Event()
        bindings.comm_init_rank = lambda *_: forever.wait(60)  # type: ignore[method-assign]
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="connected rank 0 with no group of 1 within 0 s"):
            joined(bindings, 0.1)
        with pytest.raises(RuntimeError, match="rank 1 has gone while NCCL made its connections"):
            joined(bindings, 50.0, lambda: 1)
        assert time.monotonic() - start < 10
        forever.set()

        def refuse(*_: Any) -> None:
            raise NCCLError("InvalidUsage (5): Duplicate GPU detected")

        bindings.comm_init_rank = refuse  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="cannot connect rank 0 of 1: InvalidUsage.*Duplicate GPU"):
            joined(bindings)


def test_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing, with the line that helps; how many GPUs it takes."""

    def reasons(device: str = "cuda", world_size: int = 2) -> list[str]:
        return PyNccl.unsupported(CommunicatorNeed(world_size=world_size, device=device))

    monkeypatch.setattr(card, "wrong_gpu", lambda device: [])
    monkeypatch.setattr(card, "visible_gpus", lambda: 2)
    monkeypatch.setattr(card, "version", lambda name: "0.6.1")
    assert reasons() == []
    assert reasons(world_size=4) == ["NCCL takes a GPU for each rank: 4 ranks, 2 visible"]
    assert "not cpu's" in reasons("cpu")[0] and "nobody" in reasons(world_size=1)[0]
    monkeypatch.setattr(card, "version", lambda name: "0.5.3")
    assert reasons() == ['nccl4py 0.5.3 is too old: pip install "nccl4py>=0.6,<0.7"']


@pytest.mark.gpu
def test_one_rank_on_a_gpu() -> None:
    """NCCL takes a group of one: every collective gives its input back, also as replayed from a CUDA graph."""
    pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    from engine_cuda.communicator_pynccl.body import PyNcclBody

    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder, torch.cuda.device(device):
        group = SimpleNamespace(rank=0, size=1, rendezvous=folder)
        body = PyNcclBody(SimpleNamespace(group=group, device=device, options=PyNcclOptions()))  # type: ignore[arg-type]
        for dtype in (torch.bfloat16, torch.float32, torch.int64):
            x = torch.arange(24, device=device).to(dtype).view(2, 3, 4)
            assert torch.equal(body.all_reduce(x.clone()), x)
            for dim in range(3):
                assert torch.equal(body.all_gather(x, dim, [x.shape[dim]]), x)
                assert torch.equal(body.reduce_scatter(x.clone(), dim, [x.shape[dim]]), x)
            assert torch.equal(body.all_to_all(x, [2], [2]), x)
            y = x.clone()
            body.broadcast(y, 0)
            assert torch.equal(y, x)
        fp8 = torch.arange(24, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        assert torch.equal(body.all_gather(fp8, 0, [24]).view(torch.uint8), fp8.view(torch.uint8))
        x, graph = torch.ones(4096, device=device), torch.cuda.CUDAGraph()
        body.all_reduce(x)
        with torch.cuda.graph(graph):
            y = body.all_reduce(x) * 2
            body.barrier()
        x.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        assert y.eq(6).all()
        body.barrier()
        del graph
        body.close()
        body.close()
        with pytest.raises(RuntimeError, match="closed"):
            body.all_reduce(x)


OPERATIONS = {
    "all_reduce": "sendbuff recvbuff count datatype op", "all_gather": "sendbuff recvbuff sendcount datatype",
    "broadcast": "sendbuff recvbuff count datatype root", "reduce": "sendbuff recvbuff count datatype op root",
    "reduce_scatter": "sendbuff recvbuff recvcount datatype op", "send": "sendbuff count datatype peer",
    "recv": "recvbuff count datatype peer",
}  # fmt: skip
"""What the body gives each of them, in this order; the communicator and the stream come after it."""


def test_nccl4pys_own_bindings() -> None:
    """Where it is installed: the order of arguments, the numbers of types, and a start, as far as it goes without a
    GPU: NCCL makes the id, and refuses to connect."""
    bindings = pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    for name, names in OPERATIONS.items():
        told = getattr(bindings, name).__doc__.partition("(")[2].partition(")")[0]
        assert [part.split()[-1] for part in told.split(",")] == [*names.split(), "comm", "stream"], name
    kinds = {int(kind): kind.name.lower() for kind in bindings.DataType}
    assert {number: str(dtype).removeprefix("torch.") for dtype, number in SUMMED.items()}.items() <= kinds.items()
    assert (int(bindings.RedOp.Sum), int(bindings.Result.Success), int(bindings.Result.InProgress)) == (0, 0, 7)
    assert bytes(bindings.UniqueId.from_buffer(bytes(range(128)))) == bytes(range(128))
    try:
        nccl = Nccl(0, 1, lambda data: [data], lambda: None, lambda: None, 60.0)
    except RuntimeError as error:
        assert not torch.cuda.is_available() and "NCCL" in str(error)
    else:
        nccl.check()
        nccl.abort("done")
        with pytest.raises(RuntimeError, match="done"):
            nccl.check()
