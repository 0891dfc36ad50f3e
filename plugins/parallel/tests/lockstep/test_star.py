"""The star between engine cores: who is let in, who is not, and what an address may be."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types.errors import ConfigError, EngineDeadError, EngineError
from engine.types.model import CheckpointFiles, ModelDescription
from engine.types.parallel import Parallel
from engine.types.start import WorkerStart
from engine_parallel import lockstep
from engine_parallel.lockstep import Hello, Star, Welcome

TOKEN = b"0123456789abcdef"
_huge = msgspec.msgpack.encode(Hello(2**40, 2, b"", b""))
HUGE = len(_huge).to_bytes(4, "little") + _huge
"""One that counts beyond what travels."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(address: str, rank: int, size: int, **how: Any) -> Future[Star]:
    """In a thread: it waits for the others."""
    future: Future[Star] = Future()

    def run() -> None:
        try:
            future.set_result(Star(address, rank, size, **{"meet": 20.0, "answer": 20.0, **how}))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def agreements(stars: list[Star], tokens: list[int], decodes: list[bool]) -> list[Any]:
    found: list[Any] = [None] * len(stars)

    def agree(star: Star) -> None:
        found[star.rank] = star.agree(tokens[star.rank], decodes[star.rank])

    threads = [threading.Thread(target=agree, args=(star,)) for star in stars]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@pytest.mark.parametrize("kind", ["ipc", "tcp", "tcp6"])
def test_all_hear_of_all(kind: str, tmp_path: Path) -> None:
    port = free_port()
    address = {"ipc": f"ipc://{tmp_path}/a", "tcp": f"tcp://localhost:{port}", "tcp6": f"tcp://[::1]:{port}"}[kind]
    made = [start(address, rank, 3, token=TOKEN, meeting=str(tmp_path)) for rank in (2, 0, 1)]
    stars = [future.result(20) for future in made]
    assert {star.meeting for star in stars} == {str(tmp_path)}

    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 2**20), st.booleans()), min_size=3, max_size=3))
    def agrees(told: list[tuple[int, bool]]) -> None:
        tokens, decodes = [t for t, _ in told], [d or not t for t, d in told]
        found = agreements(stars, tokens, decodes)
        if not any(tokens):
            assert found == [None] * 3 and not any(star._awake for star in stars)
            return
        for one in found:
            np.testing.assert_array_equal(one.tokens, np.maximum(tokens, 1))
            assert one.tokens.dtype == np.int32 and one.decodes is all(decodes)

    agrees()
    for star in stars:
        star.close()
    assert kind != "ipc" or not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"token": b"another one, of length"}, "another token"),
        ({"token": b""}, "another token"),
        ({"same": b"other weights"}, "another model, other settings, or other versions"),
        ({"size": 3}, "counts 3 engine cores, and rank 0 counts 2"),
        ({"rank": 7, "size": 8}, "counts 8"),
    ],
)
def test_who_is_not_let_in(how: dict[str, Any], says: str, tmp_path: Path) -> None:
    """It is told why, and rank 0 waits on for the one that belongs there."""
    address = f"ipc://{tmp_path}/a"
    head = start(address, 0, 2, token=TOKEN, same=b"weights")
    stranger = start(address, **{"rank": 1, "size": 2, "token": TOKEN, "same": b"weights", **how})
    with pytest.raises(ConfigError, match=says):
        stranger.result(20)
    other = start(address, 1, 2, token=TOKEN, same=b"weights").result(20)
    head.result(20).close()
    other.close()


def test_a_head_that_knows_no_token_is_left(tmp_path: Path) -> None:
    """Somebody else listens there, lets everybody in, and cannot prove that it belongs to them."""
    address = f"ipc://{tmp_path}/a"
    head = start(address, 0, 2, token=b"", same=b"weights")
    with pytest.raises(EngineError, match="token"):
        start(address, 1, 2, token=TOKEN, same=b"weights").result(20)
    with pytest.raises(EngineDeadError):
        Star(address, 0, 2, meet=0.2)  # the path is taken, and rank 0 of the first has it
    start(address, 1, 2, token=b"", same=b"weights").result(20).close()
    head.result(20).close()


@pytest.mark.parametrize("there", [False, True], ids=["no such folder", "a folder of the same name"])
def test_one_that_does_not_find_the_same_page_cannot_share_experts(there: bool, tmp_path: Path) -> None:
    """As in another container. Rank 0 waits on for one that does."""
    address, folder = f"ipc://{tmp_path}/a", tmp_path / "m"
    folder.mkdir()
    head = start(address, 0, 2, meeting=str(folder))
    while not (tmp_path / "a").exists():
        assert not head.done()
    folder.rename(tmp_path / "elsewhere")
    if there:
        shutil.copytree(tmp_path / "elsewhere", folder)
    with pytest.raises(ConfigError, match="another one than rank 0's" if there else "No such file"):
        start(address, 1, 2).result(20)
    shutil.rmtree(folder, ignore_errors=True)
    (tmp_path / "elsewhere").rename(folder)
    other = start(address, 1, 2).result(20)
    assert head.result(20).gone() is None
    head.result().close()
    other.close()


def test_two_machines_do_not_meet_on_a_file_that_both_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of the network shows both the same path, and each its own copy in memory."""
    address = f"tcp://127.0.0.1:{free_port()}"
    head = start(address, 0, 2, meeting=str(tmp_path))
    while not (tmp_path / lockstep.PAGE).exists():
        assert not head.done()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lockstep, "machine", lambda: "another")
        with pytest.raises(ConfigError, match="rank 1 is on another machine than rank 0"):
            start(address, 1, 2).result(20)
        elsewhere.setattr(lockstep, "machine", str)
        with pytest.raises(ConfigError, match="cannot tell whether they are on one machine"):
            Star(address, 1, 2)
    other = start(address, 1, 2).result(20)
    head.result(20).close()
    other.close()


@pytest.mark.parametrize("how", ["in order", "killed"])
def test_one_that_is_started_again_while_others_are_waited_for_joins(how: str, tmp_path: Path) -> None:
    """However late: nobody takes it for lost before all have met, and nobody goes on without it."""
    address = f"ipc://{tmp_path}/a"
    head, waits = start(address, 0, 4), start(address, 2, 4)
    if how == "in order":
        while not (tmp_path / "a").exists():
            assert not head.done()
        with pytest.raises(EngineDeadError, match="rank 0 still waits for some of them"):
            start(address, 1, 4, meet=0.1).result(20)
    else:
        killed = join(f"{tmp_path}/a", 1, 4)
        with pytest.raises(ConfigError, match="is there"):
            start(address, 1, 4).result(20)
        killed.close()
    last = start(address, 3, 4)
    with pytest.raises(TimeoutError):  # the last one does not count for one that has left
        last.result(0.1)
    stars = [one.result(20) for one in (head, start(address, 1, 4), waits, last)]
    assert [star.gone() for star in stars] == [None] * 4
    assert agreements(stars, [3, 0, 5, 2], [True] * 4)[0].tokens.tolist() == [3, 1, 5, 2]
    for star in stars:
        star.close()


def join(path: str, rank: int, size: int) -> socket.socket:
    """Join as a core does. Who closes the connection has left as one that is killed: nothing of it is on the page."""
    connection = socket.socket(socket.AF_UNIX)
    while connection.connect_ex(path):
        time.sleep(0.01)
    lockstep._read(connection, 32)
    same = hashlib.sha256(b"").digest()
    lockstep._write_message(connection, Hello(rank, size, same, bytes(32), machine=lockstep.machine()))
    assert not msgspec.msgpack.decode(lockstep._read_message(connection), type=Welcome).refused
    connection.sendall(lockstep._HERE)
    return connection


def test_who_waits_hears_that_rank_0_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = Star._present

    def ends(star: Star) -> int:
        if present(star):
            raise MemoryError
        return 0

    monkeypatch.setattr(Star, "_present", ends)
    waits = start(f"ipc://{tmp_path}/a", 1, 3)
    with pytest.raises(MemoryError):
        Star(f"ipc://{tmp_path}/a", 0, 3, meet=20.0)
    with pytest.raises(EngineDeadError, match="rank 0 closed the connection before all had met"):
        waits.result(20)


def test_who_has_left_makes_no_reason_up(tmp_path: Path) -> None:
    """A core that dies leaves first, and then says why it has died."""
    made = [start(f"ipc://{tmp_path}/a", rank, 3) for rank in range(3)]
    head, left, other = (future.result(20) for future in made)
    left.close()
    assert left.gone() is None and left.awake
    assert "data-parallel rank 1" in str(head.gone())
    head.close()
    assert "data-parallel rank 1" in str(head.gone()), "what was known stays"
    other.close()


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match="not there: rank 1, rank 2"):
        Star(f"ipc://{tmp_path}/a", 0, 3, meet=0.05)
    with pytest.raises(EngineDeadError, match="not there: rank 0"):
        Star(f"ipc://{tmp_path}/b", 1, 3, meet=0.05)


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x05\x00\x00\x00abcde", HUGE])
def test_noise_is_passed_over(noise: bytes, tmp_path: Path) -> None:
    port = free_port()
    head = start(f"tcp://127.0.0.1:{port}", 0, 2)
    caller = None
    while caller is None:
        try:
            caller = socket.create_connection(("127.0.0.1", port))
        except OSError:
            assert not head.done()
    caller.sendall(noise)
    caller.close()
    start(f"tcp://127.0.0.1:{port}", 1, 2).result(20).close()
    head.result(20).close()


def test_who_speaks_slowly_has_no_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "ANSWER_SECONDS", 0.2)
    head, done = start(f"ipc://{tmp_path}/a", 0, 2), threading.Event()
    caller = socket.socket(socket.AF_UNIX)
    while caller.connect_ex(f"{tmp_path}/a"):
        assert not head.done()

    def drip() -> None:
        with contextlib.suppress(OSError):
            caller.sendall((60_000).to_bytes(4, "little"))
            while not done.wait(0.05):
                caller.sendall(b"x")

    slow = threading.Thread(target=drip)
    slow.start()
    try:
        start(f"ipc://{tmp_path}/a", 1, 2).result(5).close()
        head.result(5).close()
    finally:
        done.set()
        slow.join(5)
        caller.close()


@pytest.mark.parametrize("asleep", [False, True])
def test_who_has_left_is_named_to_those_who_did_not_ask(asleep: bool, tmp_path: Path) -> None:
    """Rank 0 says it and leaves, too; also where it called those that sleep before."""
    made = [start(f"ipc://{tmp_path}/a", rank, 3) for rank in range(3)]
    head, left, other = (future.result(20) for future in made)
    left.close()
    if asleep:
        assert head.agree(1, True) is None
    else:
        assert head.gone() is not None
    head.close()
    assert "data-parallel rank 1 of 3" in str(other.gone())
    other.close()


@pytest.mark.parametrize("leaves", [0, 1])
def test_one_that_leaves_while_another_starts_ends_it(
    leaves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers may wait for those of the one that has left, and hear of nothing."""
    monkeypatch.setattr(lockstep, "LEFT_SECONDS", 0.1)
    ended: list[int] = []
    monkeypatch.setattr(lockstep.os, "_exit", ended.append)
    stars = [future.result(20) for future in [start(f"ipc://{tmp_path}/a", rank, 2) for rank in range(2)]]
    watch = threading.Thread(target=stars[1 - leaves].watch_start, daemon=True)
    watch.start()
    for connection in stars[leaves]._sockets.values():
        connection.close()  # as one that is killed
    deadline = time.monotonic() + 20
    while not ended:
        assert time.monotonic() < deadline
    assert ended[0] == lockstep.FAILED
    for star in stars:
        star.close()
    watch.join(20)
    assert not watch.is_alive()


def _worker(**changes: Any) -> WorkerStart:
    model = ModelDescription(
        architecture="M", dtype="float32", vocab_size=8, hidden_size=4, num_layers=1, num_q_heads=1, max_model_len=8,
        kv_specs=(),
    )  # fmt: skip
    files = CheckpointFiles(name="m", folder="m", weights=(), config={})
    start = WorkerStart(
        choices=(), model=model, files=files, layout=None, dtype="float32", device="cpu", max_model_len=8,  # type: ignore[arg-type]
        max_num_seqs=2, max_num_batched_tokens=8, meeting="/m", parallel=Parallel(dp=2, ep=True),
        num_kv_pages=9,
    )  # fmt: skip
    return msgspec.structs.replace(start, **changes)


def test_what_has_to_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides how many collectives cores make, and not what is each core's own."""
    monkeypatch.setattr(lockstep, "Star", lambda *_, same, **__: SimpleNamespace(same=same, watch_start=lambda: None))
    monkeypatch.setattr(lockstep, "brought", lambda *_: lambda worker: b"weights")

    def same(**changes: Any) -> Any:
        return lockstep.of_core(SimpleNamespace(  # type: ignore[arg-type]
            worker=_worker(**changes), lockstep="", lockstep_token="", step_timeout=1.0,
        )).same  # fmt: skip

    model = msgspec.structs.replace(_worker().model, generates=False)
    assert same() == same(num_kv_pages=12, first_dp_rank=1) == same(num_kv_pages=None, kv_cache_memory=1 << 20)
    for differs in ({"num_kv_pages": None}, {"batch_invariant": True}, {"model": model}, {"max_num_seqs": 3}):
        assert same(**differs) != same(), differs


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://host", "ipc://", "udp://a:1", "tcp://0.0.0.0:5", "tcp://[::]:5"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError):
        Star(address, 0, 2, meet=0.05)
