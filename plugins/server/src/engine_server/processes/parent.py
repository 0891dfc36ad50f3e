"""The first of several: it starts the engine cores and the API processes, and holds what these have together.

It serves nobody itself. Its event loop has little to do: requests and tokens go between the API processes and cores.
uvicorn's own processes would not do: each would start an engine of its own, they cannot be told of one that a parent
has, and nothing is held together for them: neither limits, nor responses, nor counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from engine.embedding import EngineConfig, launch, start_cores
from engine.interfaces.client import CoreState
from engine.plugin.points import NODES
from engine.process.child import Child
from engine.types.errors import ConfigError, EngineDeadError, EngineError
from engine.types.messages import Attach, Detach
from engine.types.outputs import CoreOutputs, StepStats
from engine.types.start import WorkerReady
from engine_kit.process_client import LoopListener
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import FAREWELL_SECONDS, Phase, loop_factory, say
from engine_server.metrics.gathering import Snapshot, Told, past
from engine_server.processes.attached import CorePlace
from engine_server.processes.channel import ApiStart, Channel, Handler, Message
from engine_server.processes.shared import KeptResponses
from engine_server.program import BACKLOG, Program
from engine_server.responses.store import ResponseStore

MODULE = "engine_server.processes.child"
ANSWER_SECONDS = 1.0
"""How long a process may take to tell what it has counted, where what it told last counts then, or that it serves."""
LEAVE_SECONDS = 2.0
"""How long a process gets to leave."""
SHORT_LIFE = 10.0
"""Seconds. One that dies sooner is started again after a pause, each twice as long as the last."""
LONGEST_PAUSE = 30.0


class ApiProcess:
    """An API process, as the first process sees it: its process, its channel, and what it holds.

    Args:
        handlers: of what it asks and tells, by name; each gets this object first.
        silence: seconds without a sign of life after which it is ended.
        on_end: called once, with this object, when it has gone by itself.

    Attributes:
        up: it is ready to serve.
        error: why it has gone.
        held: by digest of API keys, its requests that are counted in.
        last: what it told last of what it has counted.
        began: when it was started, by a clock that only grows.

    Raises EngineDeadError where the system refuses to start it.
    """

    def __init__(
        self, start: ApiStart, handlers: Mapping[str, Handler], silence: float, on_end: Callable[[ApiProcess], None]
    ) -> None:
        self.number = start.number
        self.client = start.client
        self.up = asyncio.Event()
        self.error: EngineError | None = None
        self.held: Counter[bytes] = Counter()
        self.began = time.monotonic()
        self._on_end = on_end
        self._child: Child[Message] = Child(
            MODULE,
            start,
            Message,
            what=f"API process {start.number}",
            silence=silence,
            patience="--api-worker-timeout",
            pass_fds=(start.listener,),
        )
        self.last = Told(self.number, self.pid, 0, Snapshot())
        self.channel = Channel({name: partial(one, self) for name, one in handlers.items()}, self._child.send)
        self._ending = threading.Lock()  # whoever finds it dead, and whoever ends them all
        self._listener = LoopListener[Message](self._child, asyncio.get_running_loop(), self._hear, self._died)

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.channel.hear(message)

    def _died(self, error: EngineError) -> None:
        self.error = error
        self.channel.end()
        self._on_end(self)

    @property
    def pid(self) -> int:
        return self._child.pid

    def addresses(self, dp_rank: int, pid: int) -> tuple[str, str]:
        """Where it binds its sockets for a core; each core of a rank has others."""
        place = f"{dp_rank}-{pid}"
        requests, outputs = (f"ipc://{self._child.directory}/{name}-{place}" for name in ("requests", "outputs"))
        return requests, outputs

    async def serve(self) -> None:
        """Let it serve; it does when this returns, so who is told of the server then is not answered that it starts."""
        await self._answer("serve", ANSWER_SECONDS)

    async def drain(self) -> int:
        """Tell it to leave in order. Returns how many requests it still has; 0 where it does not answer."""
        return await self._answer("drain", LEAVE_SECONDS) or 0

    async def renew(self) -> None:
        """Have it tell what it has counted; where it does not, what it told last counts on."""
        if (told := await self._answer("snapshot", ANSWER_SECONDS)) is not None:
            self.take(*told)

    async def _answer(self, question: str, seconds: float) -> Any:
        """Its answer; None where none comes."""
        if self.up.is_set():
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(seconds):
                    return await self.channel.ask(question)
        return None

    def take(self, active: int, snapshot: object) -> None:
        """It told what it has counted."""
        found = Snapshot() if snapshot is None else msgspec.convert(snapshot, Snapshot, strict=False)
        self.last = Told(self.number, self.pid, active, found)

    def hurry(self) -> None:
        """Have it leave at once."""
        self._child.ask_to_stop()

    async def end(self, seconds: float) -> None:
        """Wait until the process has ended, `seconds` at most, then end it. Idempotent."""
        await asyncio.to_thread(self._end, seconds)
        self.channel.end()

    def _end(self, seconds: float) -> None:
        with self._ending:
            self._child.wait(seconds)
            self._listener.stop()
            self._child.end(0)
            self._child.close()


def serve_several(
    config: EngineConfig, settings: ServerConfig, listener: socket.socket, keys: KeyRing, early: Sequence[int]
) -> int:
    """See `engine_server.run.serve`; with `settings.api_workers` processes."""
    if not hasattr(socket, "SO_REUSEPORT") or not hasattr(socket, "AF_UNIX"):
        raise ConfigError(
            f"start {settings.api_workers} API processes",
            "on this system several processes cannot listen on one port",
            "leave --api-workers out",
        )
    # That the address is free is known by now; from here on sockets that want it alone are refused.
    address = listener.getsockname()
    listener.close()
    with _sharing(listener.family, address) as place, asyncio.Runner(loop_factory=loop_factory()) as runner:
        parent = Parent(config, settings, place, keys, early)
        return runner.run(parent.run(parent))


def _sharing(family: int, address: Any) -> socket.socket:
    """A socket bound to an address that several have: the system divides connections among those that listen.

    Each process has one of its own. One socket for all would give four of five connections to the same process, as
    soon as they do not come all at once; and with one of its own, who dies is given no more connections.
    """
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(address)
    return one


class Parent(Program):
    """The first process's life in its event loop. See `serve_several`."""

    def __init__(
        self, config: EngineConfig, settings: ServerConfig, place: socket.socket, keys: KeyRing, early: Sequence[int]
    ) -> None:
        super().__init__(settings, keys, early)
        self._config = config
        self._place = place
        self._plan = plan = launch(config)
        if any(chosen.card.several for chosen in plan.chosen(NODES)):
            raise ConfigError(
                f"api_workers={settings.api_workers} with nodes={config.asked('nodes')}",
                "API processes speak to engine cores over sockets of one machine, and these run on others",
                "leave --api-workers out",
            )
        self._cores = start_cores(plan)
        self._responses = KeptResponses(ResponseStore(settings.response_store_size, settings.response_store_time))
        self._phase = Phase.STARTING
        self._processes: dict[int, ApiProcess] = {}
        self._past: Told | None = None
        self._pauses = [0.0] * settings.api_workers
        self._clients = itertools.count(1)
        self._worker: WorkerReady | None = None
        self._pids = [0] * plan.config.data_parallel_size  # of the cores that the API processes know to live
        self._failed: EngineError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what `StatisticsLog` looks at ---------------------------------------------------------------------------------
    @property
    def last_stats(self) -> StepStats | None:
        """What the cores told last."""
        return self._cores.last_stats

    @property
    def num_unfinished(self) -> int:
        """Sequences of all API processes."""
        return self._cores.num_others

    # -- life ----------------------------------------------------------------------------------------------------------
    async def _start(self, stopped: asyncio.Future[Any]) -> bool:
        """All at once. Raises the first error."""
        self._keys.on_change.append(self._tell_keys)
        for number in range(self._settings.api_workers):
            self._start_process(number)
        standing = asyncio.ensure_future(asyncio.to_thread(self._cores.wait_ready))
        await asyncio.wait((standing, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not standing.done() or self._failed is not None:
            await asyncio.to_thread(self._cores.shutdown)
            await asyncio.gather(standing, return_exceptions=True)
            if self._failed is not None:
                raise self._failed
            return False
        self._worker = standing.result()
        self._cores.listen(asyncio.get_running_loop(), self._take, self._on_death)
        self._tell_of_cores()
        up = asyncio.gather(*(process.up.wait() for process in self._processes.values()))
        await asyncio.wait((up, stopped), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._failed is not None:
            raise self._failed
        return not stopped.done()

    async def _serve(self, stopped: asyncio.Future[Any]) -> None:
        self._phase = Phase.SERVING
        await asyncio.gather(*(process.serve() for process in self._processes.values()))
        self._greet(self._plan, self._cores.worker, self._place, len(self._processes))
        await stopped

    async def _leave(self) -> None:
        """Let every process finish what it does, cut off what is left, and end."""
        served, self._phase = self._phase is Phase.SERVING, Phase.DRAINING
        processes = list(self._processes.values())
        timeout = self._settings.shutdown_timeout
        if served and self._dead is None:
            counts = await asyncio.gather(*(process.drain() for process in processes))
            if active := sum(counts):
                say(f"finishing {active} requests, for {timeout:g} s at most; a second signal ends them at once")
        for process in processes:
            if not process.up.is_set() or self._dead is not None:
                process.hurry()
        hurry = asyncio.ensure_future(self._hurry(processes))
        longest = timeout + 2 * FAREWELL_SECONDS + LEAVE_SECONDS if served else 0.0
        await asyncio.gather(*(process.end(longest) for process in processes))
        hurry.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._cores.shutdown)

    async def _hurry(self, processes: Sequence[ApiProcess]) -> None:
        await self._stop_now.wait()
        for process in processes:
            process.hurry()

    # -- API processes -------------------------------------------------------------------------------------------------
    def _start_process(self, number: int) -> None:
        replaces = self._phase is Phase.SERVING
        with _sharing(self._place.family, self._place.getsockname()) as listener:  # until the process has it
            if not replaces:
                listener.listen(BACKLOG)
            start = ApiStart(
                number=number,
                client=next(self._clients),
                core=self._plan.start,
                num_cores=self._plan.config.data_parallel_size,
                config=self._config.model_dump_json(exclude_unset=True),
                settings=self._settings.model_dump_json(exclude_unset=True),
                listener=listener.fileno(),
                asks_for_key=bool(self._keys),
                replaces=replaces,
            )
            process = ApiProcess(start, self._handlers(), self._settings.api_worker_timeout, self._on_end)
        self._processes[number] = process
        process.channel.tell("keys", self._key_table())
        for core in self._cores.states(look=False):
            if core.pid == self._pids[core.dp_rank]:
                self._attach(process, core)

    def _handlers(self) -> dict[str, Any]:
        kept = self._responses
        return {
            "up": self._on_up,
            "snapshot": ApiProcess.take,
            "gather": self._gather,
            "cache_reset": self._cache_reset,
            "enter": self._enter,
            "hold": self._hold,
            "leave": self._release,
            "put": lambda process, *values: kept.put(process.number, *values),
            "get": lambda process, *values: kept.get(*values),
            "delete": lambda process, *values: kept.delete(*values),
            "event": lambda process, *values: kept.event(*values),
            "events_end": lambda process, *values: kept.events_end(*values),
            "events": lambda process, *values: kept.events(*values),
            "cancel": self._cancel,
        }

    def _attach(self, process: ApiProcess, core: CoreState) -> None:
        """Bring a process and a core together."""
        if process.error is not None:
            return  # it has gone; what comes in its place is told of the cores then
        assert self._worker is not None
        requests, outputs = process.addresses(core.dp_rank, core.pid)
        self._cores.tell(Attach(process.client, requests, outputs), core.dp_rank)
        place = CorePlace(dp_rank=core.dp_rank, pid=core.pid, requests=requests, outputs=outputs, worker=self._worker)
        process.channel.tell("ready", place)

    async def _on_up(self, process: ApiProcess) -> None:
        process.up.set()
        if self._phase is Phase.SERVING:
            await process.serve()
            say(f"API process {process.number} serves again (process {process.pid})")

    def _on_end(self, process: ApiProcess) -> None:
        if self._phase is not Phase.DRAINING:
            self._keep(self._bury(process))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside all else, until the end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bury(self, process: ApiProcess) -> None:
        """A process has gone: free what it held; start another in its place, if this is not the end."""
        await process.end(0)
        self._cores.tell(Detach(process.client))
        for digest, count in process.held.items():
            for _ in range(count):
                self._usage_left(digest)
        process.held.clear()
        self._responses.died(process.number)
        last, process.last = process.last, Told(process.number, 0, 0, Snapshot())
        left = [last.snapshot] if self._past is None else [self._past.snapshot, last.snapshot]
        self._past = Told(None, 0, 0, past(left))
        if self._phase is Phase.DRAINING:
            return
        if self._phase is Phase.STARTING:
            self._failed = process.error
            return self._stop.set()
        lost = f", and up to {last.active} requests with it" if last.active else ""
        how = "" if process.error is None else process.error.found
        say(f"API process {process.number} (process {process.pid}) has died: {how}{lost}; another takes its place")
        await self._replace(process)

    async def _replace(self, process: ApiProcess) -> None:
        number, lived = process.number, asyncio.get_running_loop().time() - process.began
        pause = self._pauses[number]
        self._pauses[number] = 0.0 if lived > SHORT_LIFE else min(LONGEST_PAUSE, 2 * pause or 1.0)
        await asyncio.sleep(self._pauses[number])
        while self._phase is Phase.SERVING:
            try:
                return self._start_process(number)
            except (EngineError, OSError) as error:  # no socket, or no process, for now
                say(str(error))
                await asyncio.sleep(LONGEST_PAUSE)

    # -- cores ---------------------------------------------------------------------------------------------------------
    def _take(self, several: Sequence[CoreOutputs]) -> None:
        self._tell_of_cores()

    def _tell_of_cores(self) -> None:
        """Tell the API processes which cores have died, and which stand."""
        for core in self._cores.states(look=False):
            pid = core.pid if core.alive else 0
            if pid == (known := self._pids[core.dp_rank]):
                continue
            self._pids[core.dp_rank] = pid
            for process in self._processes.values():
                if known:
                    error = core.error or EngineDeadError("run the engine core", "")
                    process.channel.tell("died", core.dp_rank, error.parts)
                if pid:
                    self._attach(process, core)

    def _on_death(self, error: EngineError) -> None:
        self._tell_of_cores()
        super()._on_death(error)

    def _cache_reset(self, process: ApiProcess) -> None:
        for other in self._processes.values():
            if other is not process:
                other.channel.tell("cache_reset")

    # -- what the processes have together ------------------------------------------------------------------------------
    async def _gather(self, process: ApiProcess) -> tuple[list[Told], int]:
        await asyncio.gather(*(one.renew() for one in self._processes.values()))
        told = [one.last for one in self._processes.values()]  # as of one moment: who died meanwhile counts once
        return [*told, *([] if self._past is None else [self._past])], os.getpid()

    async def _cancel(self, process: ApiProcess, identity: str) -> bool:
        number = self._responses.runs(identity)
        if number is None or number == process.number:
            return False
        cancelled: bool = await self._processes[number].channel.ask("cancel", identity)
        return cancelled

    def _key_table(self) -> list[tuple[bytes, str, bool]]:
        return [(key.digest, key.name, bool(usage.limits)) for key, usage in self._keys.known()]

    def _tell_keys(self) -> None:
        for process in self._processes.values():
            for digest in [digest for digest in process.held if self._keys.usage(digest) is None]:
                del process.held[digest]  # a key that comes back later begins anew
            process.channel.tell("keys", self._key_table())

    def _enter(self, process: ApiProcess, digest: bytes) -> tuple[int, str, str | None, dict[str, str]] | None:
        usage = self._keys.usage(digest)
        if usage is None:
            return 401, "this API key is not valid any more", "invalid_api_key", {"WWW-Authenticate": "Bearer"}
        if (refused := usage.enter()) is not None:
            return refused.status, str(refused), refused.code, refused.headers
        process.held[digest] += 1
        return None

    def _hold(self, process: ApiProcess, digest: bytes) -> None:
        if (usage := self._keys.usage(digest)) is not None:
            usage.hold()
            process.held[digest] += 1

    def _release(self, process: ApiProcess, digest: bytes) -> None:
        if process.held[digest] > 0:
            process.held[digest] -= 1
            self._usage_left(digest)

    def _usage_left(self, digest: bytes) -> None:
        if (usage := self._keys.usage(digest)) is not None:
            usage.leave()
