"""A process that reads streams: `python -m tests.benchmarks.stream_load`, with its work as JSON on standard input.

While a run lasts, what arrives is only stored: at the end it is read event by event, and nothing is taken on trust.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

from engine.types.errors import EngineError
from engine_bench.exchange import Exchange, Target, fault_of, read_outcome

_STREAM_END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Streams:
    """What one process asks for: one connection for each body of `bodies`, on which it is sent `rounds` times."""

    host: str
    port: int
    path: str
    bodies: Sequence[Any]
    rounds: int = 1
    timeout: float = 120.0


@dataclass
class Read:
    """What came of it.

    Attributes:
        tokens: as the server counted them, of streams that completed.
        events: that brought tokens.
        first_token: seconds from sending to the first of these, of every stream.
        began, ended: `time.perf_counter`'s, of sending and of the last byte.
        processor: seconds of this process between.
        errors: words for what went wrong, one a stream.
    """

    tokens: int = 0
    events: int = 0
    first_token: list[float] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    processor: float = 0.0
    errors: list[str] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """Sends its request again and again, each when the answer to the one before is whole."""

    def __init__(self, request: bytes, rounds: int) -> None:
        self._request = request
        self._left = rounds
        self.exchanges: list[Exchange] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no instance

    def send(self) -> None:
        now = time.perf_counter()
        self._left -= 1
        self.exchanges.append(Exchange(planned=now, sent=now))
        self._pieces = self.exchanges[-1].pieces
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        if data.endswith(_STREAM_END):
            if self._left:
                self.send()
            elif not self.ended.done():
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.exchanges and not self.ended.done():
            self.exchanges[-1].fault = "closed" if error is None else fault_of(error)
            self.ended.set_result(None)


async def _run(work: Streams, wait: Callable[[], object]) -> Read:
    loop = asyncio.get_running_loop()
    target = Target(work.host, work.port, False, "", None)
    connections = []
    for body in work.bodies:
        request = target.encode("POST", work.path, body).replace(b"Connection: close\r\n", b"")
        made = await loop.create_connection(partial(_Connection, request, work.rounds), work.host, work.port)
        connections.append(made[1])
    wait()
    read = Read(began=time.perf_counter())
    processor = time.process_time()
    for connection in connections:
        connection.send()
    await asyncio.wait([connection.ended for connection in connections], timeout=work.timeout)
    read.processor = time.process_time() - processor
    exchanges = [exchange for connection in connections for exchange in connection.exchanges]
    read.ended = max((e.pieces[-1][0] for e in exchanges if e.pieces), default=read.began)
    for exchange in exchanges:
        outcome = read_outcome(exchange)
        if outcome.error:
            read.errors.append(outcome.error)
            continue
        read.tokens += outcome.output_tokens
        read.events += len(outcome.times)
        read.first_token.append(outcome.times[0])
    return read


class Reader:
    """A process that reads streams.

    Args:
        work: begins with `go`.
    """

    def __init__(self, work: Streams) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tell(json.dumps(asdict(work)))

    def wait_connected(self) -> None:
        """Wait until every connection stands. Raises EngineError where the process ended instead."""
        self._line()

    def go(self) -> None:
        """Let it send."""
        self._tell("go")

    def result(self) -> Read:
        """Wait for what came. Raises EngineError where the process ended before."""
        read = Read(**json.loads(self._line()))
        self.stop()
        return read

    def stop(self) -> None:
        """End the process. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.terminate()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError("read streams in a process beside this", "it ended; its last words are above")
        return line


def _wait_for_go() -> None:
    print("connected", flush=True)
    sys.stdin.readline()


def main() -> None:
    """Read the work, connect, wait for the word, and print what came."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends every process of the measurement; one of them says so
    import uvloop

    work = Streams(**json.loads(sys.stdin.readline()))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(_run(work, _wait_for_go)))), flush=True)


if __name__ == "__main__":
    main()
