"""The body of nodes `agent`: the head, which agents join."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import zmq

from engine.interfaces.nodes import Node
from engine.process.wire import decoder, encode
from engine.types.errors import ConfigError, ManifestError, NodeMissingError
from engine.types.messages import Beat
from engine_kit.alike import differences, versions_here, what_is_here
from engine_kit.spawning import Asker, Line, server_keys
from engine_nodes.messages import Check, Denied, Found, FromAgent, Hello, ToAgent, Welcome
from engine_nodes.token import head_keys, read_token

if TYPE_CHECKING:
    from engine.interfaces.nodes import NodesContext
    from engine.process.local import NodeProcess
    from engine_nodes.card import AgentOptions

log = logging.getLogger("engine.machines")

BEATS = 4
"""In the time after which silence is death."""
START_SECONDS = 60.0


class Agent:
    """An agent, as the head sees it.

    Attributes:
        node: its machine.
        asker: starts processes there.
        joined: it was found fit.
        silence: seconds without a sign of life.
    """

    def __init__(self, hello: Hello, send: Callable[[ToAgent], None], on_devices: bool) -> None:
        devices = hello.devices if on_devices else 0
        self.node = Node(hello.name, hello.address, devices, hello.processors, facts=hello.facts)
        self.send = send
        self.asker = Asker(send, f"node {hello.name} ({hello.address})", START_SECONDS)
        self.joined = False
        self.silence = 0.0


class Head:
    """See `engine.interfaces.nodes.Nodes`. Waits for its machines; those that come, or come back, later join as well.

    One thread hears the agents; any may spawn.
    """

    def __init__(self, context: NodesContext) -> None:
        options = cast("AgentOptions", context.options)
        self.timeout = options.timeout
        self.here = str(urlsplit(options.listen).hostname)
        self._start = context.start
        self._agents: dict[bytes, Agent] = {}
        self._changed = threading.Condition()
        self._refused: ManifestError | None = None
        self._looked = time.monotonic()
        self._beaten = self._looked
        self._decoder = decoder(FromAgent)
        _, secret = head_keys(read_token(options.token_file, "nodes.token_file"))
        self._mine = what_is_here(self._start)
        self._line = Line(zmq.ROUTER, options.listen, server_keys(secret), self._heard, self._tick)
        self._line.start()
        try:
            self._wait(options)
        except BaseException:
            self.close()
            raise

    def _wait(self, options: AgentOptions) -> None:
        """Raises ManifestError where a machine that came is not as this one; ConfigError where too few come."""
        log.info("waiting for %d machines to join %s", options.count, options.listen)
        with self._changed:
            self._changed.wait_for(
                lambda: self._refused is not None or len(self.all()) >= options.count, options.join_timeout
            )
            if self._refused is not None:
                raise self._refused
            if len(found := self.all()) < options.count:
                raise ConfigError(
                    f"nodes.count={options.count}",
                    f"after {options.join_timeout:g} s these have joined {options.listen}: "
                    + (", ".join(node.name for node in found) or "none"),
                    f"start `engine join {options.listen} --token-file F` on each; raise --nodes.join_timeout",
                )

    def all(self) -> tuple[Node, ...]:
        return tuple(sorted(agent.node for agent in list(self._agents.values()) if agent.joined))

    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> NodeProcess:
        agent = next((one for one in list(self._agents.values()) if one.joined and one.node.name == node), None)
        if agent is None:
            raise NodeMissingError(f"start {what} on '{node}'", "it is not there", "start `engine join` on it again")
        return agent.asker.spawn(node, module, start, what, devices)

    def close(self) -> None:
        for agent in list(self._agents.values()):
            agent.send(Denied("the engine has ended", again=True))
            agent.asker.lose(f"{agent.asker.where}: the engine has ended")
        self._line.close()

    # -- on the line's thread ------------------------------------------------------------------------------------------
    def _heard(self, frames: list[bytes]) -> None:
        identity, message = frames[0], self._decoder.decode(frames[1])
        if isinstance(message, Hello):
            return self._greet(identity, message)
        agent = self._agents.get(identity)
        if agent is None:  # of an earlier head, or lost meanwhile
            return self._line.send(identity, encode(Denied("the head does not know it any more", again=True)))
        agent.silence = 0.0
        if isinstance(message, Found):
            self._judge(identity, agent, message)
        else:
            agent.asker.take(message)

    def _greet(self, identity: bytes, hello: Hello) -> None:
        def send(message: ToAgent) -> None:
            self._line.send(identity, encode(message))

        agent = Agent(hello, send, self._start.device.partition(":")[0] != "cpu")
        same = [(key, one) for key, one in self._agents.items() if one.node.name == hello.name and key != identity]
        for key, one in same:
            if one.silence < 2 * self.timeout / BEATS:
                why = f"a machine at {one.node.address} has the name {hello.name}: give this one another --node-name"
                return send(Denied(why, again=one.node.address == hello.address))  # or it has not been missed yet
            self._lose(key, "its agent has joined again")
        self._agents[identity] = agent
        if differing := differences(versions_here(), hello.versions):
            return self._refuse(identity, agent, "; ".join(differing))
        send(Check(encode(self._start), self.timeout))

    def _judge(self, identity: bytes, agent: Agent, message: Found) -> None:
        if why := message.error or "; ".join(differences(self._mine, message.found)):
            return self._refuse(identity, agent, why)
        agent.send(Welcome(self.timeout))
        with self._changed:
            agent.joined = True
            self._changed.notify_all()
        log.info("%s has joined: %s", agent.asker.where, ", ".join(agent.node.facts))

    def _refuse(self, identity: bytes, agent: Agent, why: str) -> None:
        self._agents.pop(identity)
        agent.send(Denied(why))
        log.error("%s may not join: %s", agent.asker.where, why)
        with self._changed:
            remedy = "install the same there, and bring the same files to the same paths"
            self._refused = ManifestError(f"take in {agent.asker.where}", why, remedy, point="nodes")
            self._changed.notify_all()

    def _tick(self) -> None:
        now = time.monotonic()
        # One look counts as a beat at most: who was stopped, or got no processor for a while, has not listened.
        passed, self._looked = min(now - self._looked, self.timeout / BEATS), now
        beat = now - self._beaten >= self.timeout / BEATS
        for identity, agent in list(self._agents.items()):
            agent.silence += passed
            if agent.silence >= self.timeout:
                self._lose(identity, f"no sign of life for {self.timeout:g} s")
            elif beat:
                agent.send(Beat())
        if beat:
            self._beaten = now

    def _lose(self, identity: bytes, why: str) -> None:
        agent = self._agents.pop(identity)
        log.error("%s was lost: %s", agent.asker.where, why)
        agent.send(Denied(f"it was lost: {why}", again=True))
        agent.asker.lose(f"{agent.asker.where} was lost: {why}")
