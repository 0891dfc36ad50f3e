"""Point `nodes`: the machines on which an engine's processes run, and how processes are started there.

The driver works in the process that starts the engine, the head. Cores whose workers are on other machines than
themselves start these through the head (`engine_kit.machines`), so a driver needs to work nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from engine.plugin import Card
from engine.types.parallel import Parallel

if TYPE_CHECKING:
    from engine.process.local import NodeProcess
    from engine.types.start import WorkerStart

NODE_LOST = -1000
"""What `NodeProcess.poll` gives for a process on a machine that was lost."""


@dataclass(frozen=True, kw_only=True)
class NodesNeed:
    """What the engine asks of the machines.

    Args:
        num_cores: engine cores, each with the whole model.
        parallel: over how many workers each core divides it.
        device: torch's device string, where the workers compute.
    """

    num_cores: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class NodesContext:
    """What a body is built with, in the process that starts the engine.

    Args:
        options: the driver's validated `Options`, or None where its card declares none.
        need: what the engine asks.
        start: the workers' start message, of no core yet: which drivers and weights every machine needs.
    """

    need: NodesNeed
    start: WorkerStart
    options: Any = None


class NodesCard(Card):
    """Describes who knows machines."""

    several: ClassVar[bool] = False
    """Whether the machines are others than the head: what crosses between them goes over TCP, what starts there runs
    apart from this process, and one of them may be lost while the others live."""


class Node(NamedTuple):
    """A machine.

    Attributes:
        name: unique, and the same when it comes back.
        address: by which the other machines reach it; "" for the head itself.
        devices: how many workers it has a device for; 0: as many as compute on its processors.
        processors: that it has for them.
        hides: each process that is started there sees the devices alone that were asked for it, as 0, 1, ...
        facts: of its platform, for people.
    """

    name: str
    address: str = ""
    devices: int = 0
    processors: int = 1
    hides: bool = False
    facts: tuple[str, ...] = ()


class Nodes(Protocol):
    """Machines at work. Built with a `NodesContext`, which returns when they are there and fit: with the same versions,
    drivers and weights as the head has. Any thread may call.

    What was started there ends, whatever happens: with its machine's supervisor, and with the head.
    """

    here: str
    """The head's address, by which the machines reach it; "" where they are the head itself."""
    timeout: float
    """Seconds without a sign of life after which a machine, or a connection to one, is lost."""

    def __init__(self, context: NodesContext) -> None: ...

    def all(self) -> tuple[Node, ...]:
        """Those that are there now, in an order that stays. One that was lost may come back."""

    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> NodeProcess:
        """Start `python -m MODULE DIRECTORY` on a machine, with a private directory there, `start` on its standard
        input, which stays open, and no secret on its command line. Returns when it runs.

        what: it is, for errors and for people: "core 0", "core 0 rank 3 (stage 1, tp 1)". devices: that it computes on.

        Raises EngineDeadError where it cannot be started: NodeMissingError where its machine is away for now.
        """

    def close(self) -> None:
        """Let the machines go; what runs there ends. Idempotent."""
