"""Engine cores and their workers on the machines that a driver of point `nodes` knows: who sits where, how cores are
started there, and how a core starts workers on other machines: through the head, the process that starts the engine."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import zmq
from msgspec.structs import replace

from engine.interfaces.nodes import Node, Nodes, NodesContext, NodesNeed
from engine.plugin.points import EXECUTOR, NODES
from engine.process.child import Elsewhere
from engine.process.local import NodeProcess
from engine.process.wire import decoder, encode
from engine.types.errors import ConfigError, NodeMissingError
from engine.types.parallel import Parallel, Place, places
from engine.types.start import CoreStart, NodesLink, Seat
from engine_kit.process_client import ProcessClient, start_process
from engine_kit.spawning import Asker, Doer, Line, Order, Spawn, Told, client_keys, server_keys

if TYPE_CHECKING:
    from engine.embedding import Launch

START_SECONDS = 60.0
"""How long a machine may take to start a process."""


def seats(nodes: Sequence[Node], parallel: Parallel, num_cores: int) -> list[list[Seat]]:
    """The seat of every worker of every core.

    Where machines have devices, they are filled one after the other, and ranks that share layers sit on one machine
    wherever one has room for them. Where workers compute on processors, they are dealt evenly, in their order.

    Raises ConfigError where there are more workers than devices.
    """
    total = num_cores * parallel.world
    room = [node.devices for node in nodes]
    if not any(room):
        order = [index * len(nodes) // total for index in range(total)]
    elif sum(room) < total:
        raise ConfigError(
            f"run {total} workers ({num_cores} cores of {parallel.world})",
            "; ".join(f"{node.name} has {node.devices} devices" for node in nodes),
            "add machines, or lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size",
        )
    else:
        order = []
        for _ in range(total // parallel.tp):
            fits = next((at for at, left in enumerate(room) if left >= parallel.tp), None)
            free = [at for at, left in enumerate(room) for _ in range(left)]
            together = free[: parallel.tp] if fits is None else [fits] * parallel.tp
            for at in together:
                room[at] -= 1
            order += together
    sharers = Counter(nodes[at].address for at in order)  # of one machine, which may go by several names
    met, found = Counter[int](), list[Seat]()
    for at in order:
        node = nodes[at]
        device, sharing = (0, 1) if node.hides else (met[at], sharers[node.address])
        met[at] += 1
        found.append(Seat(node=node.name, address=node.address, device=device, sharers=sharing))
    return [found[core * parallel.world :][: parallel.world] for core in range(num_cores)]


def rank_map(of_cores: Sequence[Sequence[Seat]], parallel: Parallel, num_layers: int) -> list[str]:
    """Which worker sits where and has which layers, a line each."""
    lines = []
    for core, its in enumerate(of_cores):
        for place, seat in zip(places(parallel, num_layers), its, strict=True):
            layers = place.stage.layers(num_layers)
            where = f"{seat.node} ({seat.address})" if seat.address else seat.node
            lines.append(
                f"{name_of(core, place)}: {where}, device {seat.device}, layers {layers.start} to {layers.stop - 1}"
            )
    return lines


def name_of(core: int, place: Place) -> str:
    """A worker, for people."""
    among = f" cp{place.cp_rank}" if place.cp_size > 1 else ""
    return f"core{core}:rank{place.rank} stage{place.stage.index} tp{place.tp_rank}{among}"


class Machines:
    """In the process that starts an engine: its machines, and the cores on them.

    Args:
        plan: the launcher's decisions.

    Raises what the driver raises where machines do not come, or do not fit; ConfigError where they are too few.
    """

    def __init__(self, plan: Launch) -> None:
        chosen = plan.one(NODES)
        assert chosen is not None
        executor = plan.one(EXECUTOR)
        self._several = chosen.card.several
        self._apart = executor is not None and executor.card.apart
        self._relay: Relay | None = None
        worker = plan.start.worker
        self._world = worker.parallel.world
        self._threads = worker.num_threads  # as the user set them; what a client divides are this machine's
        num_cores = plan.config.data_parallel_size
        self._at_end = self.close if num_cores == 1 else None  # of several, their client closes it
        if self._several and worker.parallel.dp > 1:
            raise ConfigError(
                f"enable_expert_parallel with {num_cores} engine cores on machines of nodes={chosen.candidate.name}",
                "cores that share experts meet in a folder, and several machines have none together",
                "leave --enable-expert-parallel out, or use one core (--data-parallel-size 1)",
            )
        need = NodesNeed(num_cores=num_cores, parallel=worker.parallel, device=worker.device)
        self._nodes: Nodes = chosen.build(NodesContext(need=need, start=worker, options=chosen.options))
        self._seats: list[list[Seat]] = []
        try:
            if self._several:
                self._seats = seats(self._nodes.all(), worker.parallel, num_cores)
                for line in rank_map(self._seats, worker.parallel, worker.model.num_layers):
                    print(line, file=sys.stderr, flush=True)
                if self._apart:
                    self._relay = Relay(self._nodes)
        except BaseException:
            self.close()
            raise

    def connect(self, start: CoreStart) -> ProcessClient:
        """Start a core where it belongs, again where one has died. Raises EngineDeadError where its machine is not
        there."""
        core = start.worker.data_parallel_rank
        if not self._several:
            name = self._nodes.all()[0].name
            return start_process(start, Elsewhere(partial(self._spawn, name, core)), self._at_end)
        mine = self._seats[core]
        there = {node.name: node for node in self._nodes.all()}
        if missing := sorted({seat.node for seat in mine} - there.keys()):
            names = ", ".join(missing)
            remedy = "bring it back: that is waited for"
            raise NodeMissingError(f"start core {core} on {names}", "it is not there", remedy)
        mine = [replace(seat, address=there[seat.node].address) for seat in mine]  # it may have come back elsewhere
        home = there[mine[0].node]
        threads = self._world * min(max(1, there[seat.node].processors // seat.sharers) for seat in mine)
        worker = replace(start.worker, seats=tuple(mine), num_threads=min(threads, self._threads or threads))
        link = None if self._relay is None else self._relay.link(core, home.address, self._nodes.timeout)
        elsewhere = Elsewhere(
            partial(self._spawn, home.name, core), self._nodes.here, home.address, self._nodes.timeout
        )
        return start_process(replace(start, worker=worker, nodes=link), elsewhere, self._at_end)

    def _spawn(self, node: str, core: int, module: str, start: bytes, what: str) -> NodeProcess:
        what = f"core{core}" if self._several else what
        process = self._nodes.spawn(node, module, start, what, 0 if self._apart else 1)
        if self._relay is not None:
            self._relay.watch(core, process)
        return process

    def close(self) -> None:
        """Let the machines go, when no core runs any more. Idempotent."""
        if self._relay is not None:
            self._relay.close()
        self._nodes.close()


class Relay:
    """Starts workers for cores on other machines, which end with it."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._key, secret = zmq.curve_keypair()
        self._doers: dict[bytes, Doer] = {}
        self._cores: dict[int, NodeProcess] = {}
        self._decoder = decoder(Order)
        self._line = Line(zmq.ROUTER, f"tcp://{nodes.here}:*", server_keys(secret), self._heard, self._look)
        self._line.start()

    def link(self, core: int, here: str, timeout: float) -> NodesLink:
        """For a core, which is started now: what an earlier one in its place started ends."""
        for doer in self._take_from(core):
            doer.end()
        return NodesLink(self._line.address, self._key, core, here, timeout)

    def watch(self, core: int, process: NodeProcess) -> None:
        """What a core started ends soon after it, also where it is not started again."""
        self._cores[core] = process

    def _take_from(self, core: int) -> list[Doer]:
        mine = [one for one in list(self._doers) if one.startswith(b"%d-" % core)]
        return [doer for one in mine if (doer := self._doers.pop(one, None)) is not None]

    def _heard(self, frames: list[bytes]) -> None:
        identity, data = frames
        if identity not in self._doers:
            self._doers[identity] = Doer(self._spawn, lambda told: self._line.send(identity, encode(told)))
        self._doers[identity].take(self._decoder.decode(data))

    def _spawn(self, order: Spawn) -> NodeProcess:
        return self._nodes.spawn(order.node, order.module, order.start, order.what, order.devices)

    def _look(self) -> None:
        for doer in list(self._doers.values()):
            doer.look()
        for core, process in list(self._cores.items()):
            if process.poll() is not None and self._cores.get(core) is process:
                del self._cores[core]
                for doer in self._take_from(core):
                    threading.Thread(target=doer.end, name="end", daemon=True).start()  # it waits for processes

    def close(self) -> None:
        self._line.close()
        for doer in self._doers.values():
            doer.end()


class CoreNodes:
    """In an engine core: machines on which it starts workers, through the head. See `engine.interfaces.nodes.Nodes`."""

    def __init__(self, link: NodesLink) -> None:
        self.here = link.here
        self.timeout = link.timeout
        self._decoder = decoder(Told)
        # A core that stands in the place of a dead one is another for the head, which has its workers by this name.
        options = client_keys(link.key) | {zmq.IDENTITY: b"%d-" % link.core + zmq.curve_keypair()[0][:16]}
        self._line = Line(zmq.DEALER, link.address, options, self._heard)
        self._asker = Asker(lambda order: self._line.send(encode(order)), "", START_SECONDS)
        self._line.start()
        self._closing = threading.Lock()

    def _heard(self, frames: list[bytes]) -> None:
        self._asker.take(self._decoder.decode(frames[0]))

    def all(self) -> tuple[Node, ...]:
        """Nobody asks a core: its workers have their seats."""
        return ()

    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> NodeProcess:
        return self._asker.spawn(node, module, start, what, devices)

    def close(self) -> None:
        self._line.close()


def of_core(link: NodesLink) -> Nodes:
    """The machines of a core."""
    return cast(Nodes, CoreNodes(link))
