"""`engine join`: the agent of a machine. It joins the head, starts what that asks for, ends it when the head goes."""

from __future__ import annotations

import logging
import os
import platform
import queue
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import zmq

from engine.process.local import LocalProcess
from engine.process.wire import decoder, encode
from engine.types.errors import ConfigError, ManifestError
from engine.types.messages import Beat
from engine.types.start import WorkerStart
from engine_kit.alike import versions_here, what_is_here
from engine_kit.host_gpus import capabilities
from engine_kit.logs import log_as
from engine_kit.spawning import Doer, Kill, LetGo, Line, Spawn, client_keys
from engine_nodes.card import names_one
from engine_nodes.messages import Check, Denied, Found, FromAgent, Hello, ToAgent, Welcome
from engine_nodes.settings import JoinSettings
from engine_nodes.token import head_keys, read_token

if TYPE_CHECKING:
    from engine.embedding import Merged

log = logging.getLogger("engine.machines")

BEATS = 4
RETRY_SECONDS = 1.0
"""How soon an agent whose head went looks for one again."""
PATIENCE = 10.0
"""How long a head may take to answer, before the agent knows its timeout."""


def join(head: str, merged: Merged) -> int:
    """Serve a head until SIGTERM or Ctrl-C; look for it again whenever it has gone. Returns the exit code.

    Raises ConfigError for an address or token that is none; ManifestError where this machine is not as the head.
    """
    from engine.embedding import validated

    settings = validated(JoinSettings, merged)
    place = urlsplit(head)
    try:
        host, port = place.hostname, place.port
    except ValueError:  # no number, or none of a port
        host, port = None, None
    if place.scheme != "tcp" or not host or not port:
        raise ConfigError(
            f"join {head}".strip(), "that is no address", "name it: tcp://HOST:PORT, as the head's --nodes.listen"
        )
    if settings.node_address is not None and not names_one(settings.node_address):
        raise ConfigError(
            f"node_address={settings.node_address}", "others cannot reach it by that", "name this machine's own address"
        )
    public, _ = head_keys(read_token(settings.token_file, "token_file"))
    log_as("text")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    print(f"looking for the head at {head}", flush=True)
    said = None
    while not stopped.is_set():
        try:
            hello = _hello(settings, host, port)
        except OSError as error:  # the network is out, or who knows names
            why: str | None = f"there is no way to {head}: {error}"
        else:
            session = Session(head, public, hello)
            try:
                why = session.run(stopped)
            finally:
                session.close()
        if why not in (None, said):
            print(why, flush=True)
        said = why
        stopped.wait(RETRY_SECONDS)
    return 0


def _hello(settings: JoinSettings, host: str, port: int) -> Hello:
    address = settings.node_address
    if address is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: it is asked for the route
            probe.connect((host, port))
            address = str(probe.getsockname()[0])
    gpus = len(capabilities()) if settings.node_devices is None else settings.node_devices
    facts = (f"{platform.system()} {platform.release()}", f"{os.cpu_count()} processors", f"{gpus} devices")
    name = settings.node_name or socket.gethostname()
    return Hello(name, address, gpus, os.cpu_count() or 1, facts, versions_here())


class Session:
    """One time with a head, from joining it to its end. All but a look at this machine's files is on one thread."""

    def __init__(self, head: str, key: bytes, hello: Hello) -> None:
        self._hello = hello
        self._head = head
        self._decoder = decoder(ToAgent)
        self._heard: queue.SimpleQueue[ToAgent] = queue.SimpleQueue()
        self._line = Line(zmq.DEALER, head, client_keys(key), self._hear)
        self._doer = Doer(self._spawn, self._tell)
        self._line.start()

    def _hear(self, frames: list[bytes]) -> None:
        self._heard.put(self._decoder.decode(frames[0]))

    def _tell(self, message: FromAgent) -> None:
        self._line.send(encode(message))

    def _look(self, start: bytes) -> None:
        """On a thread of its own: weights are read."""
        try:
            found = Found(what_is_here(decoder(WorkerStart).decode(start)))
        except Exception as error:  # the head would wait for it
            log.exception("this machine's versions and files could not be looked at")
            found = Found({}, f"it could not look at its files: {type(error).__name__}: {error}")
        self._tell(found)

    def _spawn(self, order: Spawn) -> LocalProcess:
        process = LocalProcess(order.module, order.start, order.what)
        print(f"started {order.what}: process {process.pid}", flush=True)
        return process

    def run(self, stopped: threading.Event) -> str | None:
        """Until the head goes: why, for people; None where it never came. Raises ManifestError where it refuses."""
        self._tell(self._hello)
        timeout, joined, came = PATIENCE, False, False
        silence, beaten = 0.0, time.monotonic()
        looked = beaten
        while not stopped.is_set():
            try:
                message = self._heard.get(timeout=0.05)
            except queue.Empty:
                message = None
            now = time.monotonic()
            silence, looked = silence + min(now - looked, timeout / BEATS), now  # see `Head`
            if message is not None:
                silence, came = 0.0, True
            match message:
                case Check(start, timeout):
                    threading.Thread(target=self._look, args=(start,), name="look", daemon=True).start()
                case Welcome(timeout):
                    joined = True
                    print(f"joined {self._head} as {self._hello.name} ({self._hello.address})", flush=True)
                case Denied(why, again):
                    if not again:
                        raise ManifestError(f"join {self._head}", why, "mend that, and join again", point="nodes")
                    return f"left {self._head}: {why}" if joined else f"{self._head} does not take it in: {why}"
                case Spawn() | LetGo() | Kill():
                    self._doer.take(message)
            self._doer.look()
            if silence >= timeout:
                return f"left {self._head}: no sign of life for {timeout:g} s" if came else None
            if now - beaten >= timeout / BEATS:
                beaten = now
                self._tell(Beat())
        return None

    def close(self) -> None:
        """End what was started, and tell nobody any more."""
        self._doer.end()
        self._line.close()
