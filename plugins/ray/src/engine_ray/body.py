"""The body of nodes `ray`: a placement group, whose bundles are the machines, and an actor for each process.

A bundle holds the ranks that share layers, where some machine of the cluster has devices for all of them, so these sit
on one; else it holds one worker. Ray moves a bundle whose machine was lost to another one that has room: so a core is
started again there, under the bundle's name.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.interfaces.nodes import NODE_LOST, Node
from engine.process.wire import encode
from engine.types.errors import ConfigError, EngineDeadError, ManifestError, NodeMissingError
from engine_kit.alike import differences, what_is_here
from engine_ray.supervisor import Supervisor

if TYPE_CHECKING:
    from engine.interfaces.nodes import NodesContext
    from engine.process.local import NodeProcess
    from engine_ray.card import RayOptions

log = logging.getLogger("engine.machines")

LOOK_SECONDS = 0.05
"""How long one wait for the end of any process lasts."""
START_SECONDS = 60.0
LEAVE_SECONDS = 3.0
"""How long processes get to leave before their actors are killed, with which Ray kills them."""
MADE = "CREATED"
"""What Ray calls a placement group whose bundles all have their places."""


class Ray:
    """See `engine.interfaces.nodes.Nodes`."""

    def __init__(self, context: NodesContext) -> None:
        self._options = cast("RayOptions", context.options)
        self.timeout = self._options.timeout
        need = context.need
        total, tp = need.num_cores * need.parallel.world, need.parallel.tp
        self._resource = "CPU" if need.device.partition(":")[0] == "cpu" else "GPU"
        self._mine = not ray.is_initialized()
        self._running: dict[Any, Supervised] = {}
        self._named = Counter[str]()
        self._closed = threading.Event()
        self._group: Any = None
        self._watching = threading.Thread(target=self._watch, name="ray", daemon=True)
        if self._mine:
            with _own_signals():
                address = self._options.address or "local"  # else Ray takes a cluster that it finds
                try:
                    ray.init(address=address, namespace=f"engine-{secrets.token_hex(8)}", log_to_driver=True)
                except (RayError, ConnectionError, ValueError) as error:
                    raise ConfigError(
                        f"nodes.address={self._options.address}", str(error), "name a cluster that runs: ray status"
                    ) from error
        try:
            self.here = str(ray.util.get_node_ip_address())
            self._devices = tp if self._fits(tp) else 1
            self._group = self._place(total // self._devices)
            self._compare(context)
        except BaseException:
            self.close()
            raise
        self._watching.start()

    # -- machines ------------------------------------------------------------------------------------------------------
    def _each(self, workers: int) -> dict[str, float]:
        """The resources of so many workers."""
        cpus = {"CPU": workers * self._options.cpus} if self._options.cpus else {}
        return cpus if self._resource == "CPU" else {"GPU": float(workers), **cpus}

    def _fits(self, workers: int) -> bool:
        """Whether one machine of the cluster has devices for so many."""
        asked = self._each(workers).items()
        living = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return any(all(found.get(name, 0) >= amount for name, amount in asked) for found in living)

    def _place(self, bundles: int) -> Any:
        each = self._each(self._devices)
        group = placement_group([each] * bundles, strategy=self._options.strategy, name="engine")
        if not group.wait(self._options.place_timeout):
            remove_placement_group(group)
            room = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU")}
            raise ConfigError(
                f"place {bundles} bundles of {each} in the Ray cluster",
                f"no room for {self._options.place_timeout:g} s; it has {room} in all",
                "add machines, or lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size",
            )
        return group

    def all(self) -> tuple[Node, ...]:
        """Raises NodeMissingError where Ray does not answer."""
        try:
            table = placement_group_table(self._group)
            alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        except (RayError, ConnectionError) as error:
            raise NodeMissingError("ask Ray for its machines", _short(error), "see `ray status`") from error
        if table.get("state") != MADE:
            return ()
        found = []
        for bundle, node_id in sorted(table["bundles_to_node_id"].items()):
            if (node := alive.get(node_id)) is not None:
                facts = (str(node["NodeManagerHostname"]), f"Ray node {node_id[:8]}")
                processors = max(1, int(node["Resources"].get("CPU", 1)))
                place = Node(f"bundle{bundle}", str(node["NodeManagerAddress"]), self._devices, processors)
                found.append(place._replace(hides=self._resource == "GPU", facts=facts))
        return tuple(found)

    def _compare(self, context: NodesContext) -> None:
        """Raises ManifestError where a machine is not as this one, or cannot look."""
        mine, start = what_is_here(context.start), encode(context.start)
        places = range(self._group.bundle_count)
        actors = [self._actor(f"look at bundle{place}", place, 0) for place in places]
        deadline = time.monotonic() + self._options.place_timeout
        answers: list[dict[str, str]] = []
        try:
            for asked in [actor.found.remote(start) for actor in actors]:
                answers.append(ray.get(asked, timeout=max(0.0, deadline - time.monotonic())))
        except RayError as error:  # Engine is not there, say, or another one
            cause = error.cause if isinstance(error, RayTaskError) and error.cause else error
            why = f"it could not look at its files: {type(cause).__name__}: {_short(cause)}"
            remedy = "install the same there, and see its log; raise --nodes.place_timeout where it needs longer"
            raise ManifestError(f"take in bundle{len(answers)}", why, remedy, point="nodes") from error
        finally:
            for actor in actors:
                ray.kill(actor)
        for place, found in zip(places, answers, strict=True):
            if differing := differences(mine, found):
                node = next((node for node in self.all() if node.name == f"bundle{place}"), Node("?"))
                raise ManifestError(
                    f"take in {', '.join(node.facts)} ({node.address})",
                    "; ".join(differing),
                    "install the same there, and bring the same files to the same paths",
                    point="nodes",
                )

    def _actor(self, what: str, bundle: int, devices: int) -> Any:
        self._named[what] += 1  # the name of one that is dead may be taken for a while
        actor = ray.remote(Supervisor).options(
            name=f"engine:{what}" + (f" ({self._named[what]})" if self._named[what] > 1 else ""),
            num_cpus=devices * self._options.cpus,
            num_gpus=devices if self._resource == "GPU" else 0,
            max_concurrency=8,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            runtime_env={"env_vars": dict(pair.split("=", 1) for pair in self._options.env.split(",") if pair)},
        )
        return actor.remote()

    # -- processes -----------------------------------------------------------------------------------------------------
    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> NodeProcess:
        place = next((one for one in self.all() if one.name == node), None)
        if place is None:
            raise NodeMissingError(f"start {what} on '{node}'", "Ray has no place for it now", "see `ray status`")
        supervisor = self._actor(what, int(node.removeprefix("bundle")), devices)
        try:
            pid, directory = ray.get(supervisor.start.remote(module, start, what), timeout=START_SECONDS)
        except RayTaskError as error:
            ray.kill(supervisor)
            found = error.cause or error
            raise EngineDeadError(f"start {what} on {node} ({place.address})", str(found)) from error
        except RayError as error:  # Ray has not noticed yet that the machine is lost, or looks for another one
            with contextlib.suppress(RayError):
                ray.kill(supervisor)
            found = f"its actor did not start: {_short(error)}"
            raise NodeMissingError(f"start {what} on {node} ({place.address})", found, "see `ray status`") from error
        process = Supervised(supervisor, pid, directory, f"{node} ({place.address})")
        self._running[supervisor.wait.remote()] = process
        return process

    def _watch(self) -> None:
        """Hear who has ended: the actor says it, or Ray says that the actor has died."""
        while not self._closed.is_set():
            asked = list(self._running)
            if not asked:
                time.sleep(LOOK_SECONDS)
                continue
            try:
                ended = ray.wait(asked, timeout=LOOK_SECONDS)[0]
            except Exception as error:  # the cluster has gone
                log.exception("Ray does not say what has ended")
                for one in asked:
                    self._running.pop(one).end(NODE_LOST, f"Ray does not answer: {_short(error)}")
                continue
            for done in ended:
                process = self._running.pop(done)
                try:
                    process.end(*ray.get(done))
                except RayActorError as error:
                    process.end(NODE_LOST, f"its actor has died: {_short(error)}")
                except RayError as error:
                    process.end(NODE_LOST, str(error))

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        if self._watching.is_alive():
            self._watching.join()  # who asks Ray after its end is ended with the whole process
        with contextlib.suppress(Exception):  # the cluster may have gone
            for process in self._running.values():
                process.let_go()
            if self._running:
                ray.wait(list(self._running), num_returns=len(self._running), timeout=LEAVE_SECONDS)
        for process in list(self._running.values()):
            process.end(NODE_LOST, "the engine has ended")
        with contextlib.suppress(Exception):  # the cluster may have gone
            if self._group is not None:
                remove_placement_group(self._group)
        if self._mine:
            ray.shutdown()


class Supervised:
    """See `engine.process.local.NodeProcess`."""

    def __init__(self, supervisor: Any, pid: int, directory: str, where: str) -> None:
        self.pid = pid
        self.directory = directory
        self._supervisor = supervisor
        self._where = where
        self._code: int | None = None
        self._how = f"process {pid}"

    def end(self, code: int, how: str) -> None:
        """It has ended."""
        self._how = how
        self._code = code
        with contextlib.suppress(Exception):  # as it may have
            ray.kill(self._supervisor)

    def poll(self) -> int | None:
        return self._code

    def let_go(self) -> None:
        if self._code is None:
            self._supervisor.let_go.remote()

    def kill(self, hangs: bool = False) -> None:
        if self._code is None:
            self._supervisor.kill.remote(hangs)

    def describe(self) -> str:
        return f"{self._how} on {self._where}"

    def close(self) -> None:
        """The actor has ended with it."""


def _short(error: BaseException) -> str:
    """What Ray says in many lines."""
    return " ".join(str(error).split())[:300]


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """What Ray does with signals where it starts a cluster is not for a server that drains."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
