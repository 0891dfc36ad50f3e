"""What ranks do in a meeting. Each function runs on every rank and answers with what it found; the suite compares.

A collective that the driver does not accept in some form is left out, on all ranks alike, and answered with None.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.interfaces.communicator import ANY_LENGTH, Collective, Communicator

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8")


def whole_numbers(seed: Sequence[int], *shape: int, dtype: str = "int64") -> torch.Tensor:
    """Small ones, the same on every rank: every dtype adds a few of them up exactly."""
    drawn = np.random.default_rng(list(seed)).integers(0, 9, shape)
    return torch.from_numpy(drawn).to(getattr(torch, dtype))


def lengths_of(size: int, longest: int) -> list[int]:
    """Uneven ones, a part of a single element and one of none among them."""
    return [(longest, 1, 0, longest // 2 + 1, 3, 2)[rank % 6] for rank in range(size)]


def counts_of(size: int, rows: int) -> np.ndarray:
    """[from, to] rows that ranks send each other; some none."""
    return np.array([[rows * ((r + 2 * c) % 3) for c in range(size)] for r in range(size)])


def collectives(
    communicator: Communicator, rank: int, size: int, dtypes: Sequence[str] = DTYPES, n: int = 7
) -> dict[str, Any]:
    """Every collective in every dtype, of tensors whose sizes go with n."""
    found: dict[str, Any] = {}
    for dtype in dtypes:
        for name, (op, shape, work) in _calls(communicator, rank, size, dtype, n).items():
            accepted = communicator.accepts(op, shape, getattr(torch, dtype))
            found[f"{name} {dtype}"] = work() if accepted else None
    if communicator.accepts("barrier", (), None):
        communicator.barrier()
    return found


Call = tuple[Collective, tuple[int, ...], Callable[[], torch.Tensor]]
"""A collective, the shape that `accepts` is asked with, and the call itself."""


def _calls(c: Communicator, rank: int, size: int, dtype: str, n: int) -> dict[str, Call]:
    """What this rank calls, in this order."""
    lengths, counts = lengths_of(size, n), counts_of(size, n)
    total, own = sum(lengths), lengths[rank]
    send, recv = counts[rank].tolist(), counts[:, rank].tolist()

    def mine(tag: int, *shape: int) -> torch.Tensor:
        return whole_numbers((tag, rank), *shape, dtype=dtype)

    calls: dict[str, Call] = {
        "all_reduce": ("all_reduce", (5, n), lambda: c.all_reduce(mine(1, 5, n))),
        "all_reduce strided": ("all_reduce", (n, 5), lambda: c.all_reduce(mine(1, 5, n).T)),
        "all_reduce scalar": ("all_reduce", (), lambda: c.all_reduce(mine(2))),
        "all_gather even": ("all_gather", (size * 3, n), lambda: c.all_gather(mine(3, 3, n), 0, [3] * size)),
        "all_gather rows": ("all_gather", (total, 4), lambda: c.all_gather(mine(4, own, 4), 0, lengths)),
        "all_gather columns": ("all_gather", (2, total, 3), lambda: c.all_gather(mine(5, 2, own, 3), 1, lengths)),
        "reduce_scatter rows": ("reduce_scatter", (total, 3), lambda: c.reduce_scatter(mine(6, total, 3), 0, lengths)),
        "reduce_scatter columns": (
            "reduce_scatter", (2, total), lambda: c.reduce_scatter(mine(7, 2, total), 1, lengths),
        ),
        "all_to_all": ("all_to_all", (ANY_LENGTH, 3), lambda: c.all_to_all(mine(8, sum(send), 3), send, recv)),
    }  # fmt: skip
    for root in range(size):
        calls[f"broadcast {root}"] = ("broadcast", (n,), functools.partial(_filled, c, mine(9, n), root))
    calls["broadcast strided"] = ("broadcast", (5,), lambda: _column(c, mine(10, 5, n)))
    calls["send"] = ("send", (n,), lambda: _passed_on(c, rank, size, mine(11, n)))
    return calls


def _filled(communicator: Communicator, x: torch.Tensor, root: int) -> torch.Tensor:
    communicator.broadcast(x, root)
    return x


def _column(communicator: Communicator, x: torch.Tensor) -> torch.Tensor:
    communicator.broadcast(x[:, 2], 1)
    return x


def _passed_on(communicator: Communicator, rank: int, size: int, x: torch.Tensor) -> torch.Tensor:
    """Along the ranks, one after the other: each passes its own on and takes that of the one before."""
    got = x.clone()
    if rank:
        communicator.recv(got, rank - 1)
    if rank < size - 1:
        communicator.send(x, rank + 1)
    return got


def expected(rank: int, size: int, dtypes: Sequence[str] = DTYPES, n: int = 7) -> dict[str, torch.Tensor]:
    """What `collectives` has to find on a rank, from the definitions."""
    lengths, counts, found = lengths_of(size, n), counts_of(size, n), {}
    total, starts = sum(lengths), np.cumsum([0, *lengths])
    part = slice(starts[rank], starts[rank + 1])
    for dtype in dtypes:

        def of(tag: int, r: int, *shape: int, dtype: str = dtype) -> torch.Tensor:
            return whole_numbers((tag, r), *shape, dtype=dtype)

        def summed(tag: int, *shape: int, of: Any = of) -> torch.Tensor:
            whole: torch.Tensor = sum(of(tag, r, *shape) for r in range(size))
            return whole

        def rows(r: int, of: Any = of) -> torch.Tensor:
            own: torch.Tensor = of(8, r, int(counts[r].sum()), 3).split(counts[r].tolist())[rank]
            return own

        column = of(10, rank, 5, n)
        column[:, 2] = of(10, 1, 5, n)[:, 2]
        answers = {
            "all_reduce": summed(1, 5, n),
            "all_reduce strided": summed(1, 5, n).T,
            "all_reduce scalar": summed(2),
            "all_gather even": torch.cat([of(3, r, 3, n) for r in range(size)]),
            "all_gather rows": torch.cat([of(4, r, lengths[r], 4) for r in range(size)]),
            "all_gather columns": torch.cat([of(5, r, 2, lengths[r], 3) for r in range(size)], dim=1),
            "reduce_scatter rows": summed(6, total, 3)[part],
            "reduce_scatter columns": summed(7, 2, total)[:, part],
            "all_to_all": torch.cat([rows(r) for r in range(size)]),
            **{f"broadcast {root}": of(9, root, n) for root in range(size)},
            "broadcast strided": column,
            "send": of(11, max(rank - 1, 0), n),
        }
        found.update({f"{name} {dtype}": value for name, value in answers.items()})
    return found


# -- sums ------------------------------------------------------------------------------------------------------------
FLOATS = ("float64", "float32", "bfloat16", "float16")


def addend(rank: int, count: int) -> torch.Tensor:
    """float64 [count]: numbers of very different size, so that the order of adding shows in the last bits. The first
    are the same, however many."""
    drawn = np.random.default_rng([17, rank]).normal(size=(count, 2))
    return torch.from_numpy(drawn[:, 0] * 2.0 ** np.clip(4 * drawn[:, 1], -9, 9))


def sums(communicator: Communicator, rank: int, size: int, count: int) -> dict[str, Any]:
    """The same sums by all_reduce and reduce_scatter, in every float dtype."""
    found: dict[str, Any] = {}
    sizes = [count // size] * (size - 1) + [count - count // size * (size - 1)]
    for dtype in FLOATS:
        x = addend(rank, count).to(getattr(torch, dtype))
        if communicator.accepts("all_reduce", (count,), x.dtype):
            found[f"all_reduce {dtype}"] = communicator.all_reduce(x.clone())
        if communicator.accepts("reduce_scatter", (count,), x.dtype):
            found[f"reduce_scatter {dtype}"] = communicator.reduce_scatter(x.clone(), 0, sizes)
    return found


# -- who takes what --------------------------------------------------------------------------------------------------
def answers(communicator: Communicator, rank: int, size: int) -> list[bool]:
    """`accepts` of many forms, asked in another order on each rank, and twice."""
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv")
    shapes = ((), (1,), (7,), (64,), (3, 5), (128, 4096), (1 << 20,), (1 << 24,), (0, 3), (ANY_LENGTH, 8), (5, 1, 3))
    forms: list[Any] = [(op, shape, getattr(torch, dtype)) for op in ops for shape in shapes for dtype in DTYPES]
    forms += [("barrier", (), None)]
    order = np.random.default_rng(rank).permutation(len(forms))
    first = {int(i): communicator.accepts(*forms[i]) for i in order}
    again = {int(i): communicator.accepts(*forms[i]) for i in order[::-1]}
    assert first == again, "asked again, it answers otherwise"
    return [bool(first[i]) for i in range(len(forms))]


# -- many calls, few elements, none ----------------------------------------------------------------------------------
def rounds(communicator: Communicator, rank: int, size: int, turns: int) -> int:
    """Collectives of all sizes without a pause, with ranks that dawdle in turn; answers how many were wrong."""
    wrong = 0
    for turn in range(turns):
        count = int(np.random.default_rng([3, turn]).integers(1, 100_000 if turn % 20 == 0 else 2000))
        parts = [whole_numbers((turn, r), count, dtype="float32") for r in range(size)]
        if turn % 17 == rank:
            time.sleep(0.002)
        if communicator.accepts("all_reduce", (count,), torch.float32):
            wrong += not torch.equal(communicator.all_reduce(parts[rank].clone()), torch.stack(parts).sum(0))
        if communicator.accepts("all_gather", (count * size,), torch.float32):
            wrong += not torch.equal(communicator.all_gather(parts[rank], 0, [count] * size), torch.cat(parts))
        if communicator.accepts("send", (count,), torch.float32):
            source, to = turn % size, (turn + 1) % size
            if rank == source:
                communicator.send(parts[rank], to)
            elif rank == to:
                got = torch.empty(count)
                communicator.recv(got, source)
                wrong += not torch.equal(got, parts[source])
    if communicator.accepts("barrier", (), None):
        communicator.barrier()  # who leaves while others wait for each other has gone, to them
    return wrong


def empty(communicator: Communicator, rank: int, size: int) -> list[Any]:
    """Tensors without elements."""
    found: list[Any] = []
    if communicator.accepts("all_reduce", (0, 3), torch.float32):
        found.append((tuple(communicator.all_reduce(torch.empty(0, 3)).shape), (0, 3)))
    if communicator.accepts("all_gather", (0, 3 * size), torch.float32):
        found.append((tuple(communicator.all_gather(torch.empty(0, 3), 1, [3] * size).shape), (0, 3 * size)))
    if communicator.accepts("all_to_all", (ANY_LENGTH, 2), torch.float32):
        none = [0] * size
        found.append((tuple(communicator.all_to_all(torch.empty(0, 2), none, none).shape), (0, 2)))
    return found


# -- one large message -----------------------------------------------------------------------------------------------
def large(communicator: Communicator, rank: int, size: int, count: int) -> dict[str, bool | None]:
    """One tensor of `count` float32, or 3 more, by each collective: whether every element came; None for what is not
    accepted. Numbers, and their sums, that float32 holds exactly; each in one place alone, so that no part can stand
    for another."""

    def of(r: int, n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.float32) + 1_000_003 * r

    more = count + 3
    part = [count // size] * (size - 1) + [count - count // size * (size - 1)]
    own = slice(sum(part[:rank]), sum(part[: rank + 1]))
    calls: dict[Collective, tuple[int, Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
        "send": (
            count, lambda: _passed_on(communicator, rank, size, of(rank, count)), lambda: of(max(rank - 1, 0), count),
        ),
        "broadcast": (more, lambda: _filled(communicator, of(rank, more), size - 1), lambda: of(size - 1, more)),
        "all_gather": (count, lambda: communicator.all_gather(of(0, count)[own], 0, part), lambda: of(0, count)),
        "all_reduce": (
            more, lambda: communicator.all_reduce(of(rank, more)),
            lambda: torch.stack([of(r, more) for r in range(size)]).sum(0),
        ),
    }  # fmt: skip
    found: dict[str, bool | None] = {}
    for op, (n, work, wanted) in calls.items():
        found[op] = torch.equal(work(), wanted()) if communicator.accepts(op, (n,), torch.float32) else None
    return found


# -- ends ------------------------------------------------------------------------------------------------------------
def _collective(communicator: Communicator, op: str, rank: int, size: int) -> bool:
    """One collective in which the last rank has a part, the root's or the receiver's; False where it is not accepted.
    "any": of which no rank can do without another."""
    x, last = torch.ones(1000), size - 1
    if op == "any":
        return _collective(communicator, "all_reduce", rank, size) or _collective(communicator, "barrier", rank, size)
    if op == "barrier":
        accepted = communicator.accepts("barrier", (), None)
    else:
        accepted = communicator.accepts(op, (1000,), torch.float32)  # type: ignore[arg-type]
    if not accepted:
        return False
    if op == "all_reduce":
        communicator.all_reduce(x)
    elif op == "barrier":
        communicator.barrier()
    elif op == "broadcast":
        communicator.broadcast(x, last)
    elif op == "recv":
        communicator.recv(x, last)
    else:
        raise AssertionError(op)
    return True


def gone(
    communicator: Communicator, rank: int, size: int, op: str, how: str, folder: str, patience: float = 20.0
) -> tuple[str, float] | None:
    """The last rank is killed, or closes, while the others wait for it: the error's type, and seconds until it came.
    Where calls are queued, one that comes later may raise it. None where the driver does not accept the collective.

    folder: a rank that has closed lives on until the others have said there that they are through.
    """
    _collective(communicator, "any", rank, size)
    if rank == size - 1:
        time.sleep(0.2)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.close()
        deadline = time.monotonic() + patience
        while len(os.listdir(folder)) < size - 1 and time.monotonic() < deadline:
            time.sleep(0.002)
        return "closed", 0.0
    start = time.monotonic()
    try:
        if not _collective(communicator, op, rank, size):
            return None
        while getattr(communicator, "queued", False) and time.monotonic() - start < patience:
            _collective(communicator, op, rank, size)
    except RuntimeError as error:
        return f"RuntimeError: {error}", time.monotonic() - start
    finally:
        Path(folder, str(rank)).touch()
    return "no error", time.monotonic() - start


def closed(communicator: Communicator, rank: int, size: int) -> list[str]:
    """`close` twice, without the others; then every collective: those that were not answered with a RuntimeError."""
    _collective(communicator, "any", rank, size)
    communicator.close()
    communicator.close()
    calls: dict[str, Any] = _calls(communicator, rank, size, "float32", 7)
    calls["barrier"] = ("barrier", (), communicator.barrier)
    silent = []
    for name, (op, shape, work) in calls.items():
        if communicator.accepts(op, shape, None if op == "barrier" else torch.float32):
            try:
                work()
            except RuntimeError:
                continue
            silent.append(name)
    return silent


def timed(communicator: Communicator, rank: int, size: int, count: int) -> float | None:
    """Median seconds of an all_reduce of `count` float32."""
    if not communicator.accepts("all_reduce", (count,), torch.float32):
        return None
    x, taken = torch.zeros(count), []
    for _ in range(60):
        start = time.perf_counter()
        communicator.all_reduce(x)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[10:]))


def sent_ahead(communicator: Communicator, rank: int, size: int, folder: str) -> str:
    """ "ahead" where rank 0 has sent by `isend` before rank 1 asks, and that gets all, in order; else "late". "none"
    without `isend`."""
    isend: Any = getattr(communicator, "isend", None)
    if isend is None or not communicator.accepts("send", (50_000,), torch.float32):
        return "none"
    tensors, sent = [torch.full((50_000,), float(number)) for number in range(3)], Path(folder, "sent")
    if rank == 0:
        sendings = [isend(tensor, 1) for tensor in tensors]
        sent.touch()
        for sending in sendings:
            sending.wait()
        return "ahead"
    deadline = time.monotonic() + 10
    while not sent.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    ahead = sent.exists()
    for tensor in tensors:
        got = torch.empty_like(tensor)
        communicator.recv(got, 0)
        ahead = ahead and torch.equal(got, tensor)
    return "ahead" if ahead else "late"
