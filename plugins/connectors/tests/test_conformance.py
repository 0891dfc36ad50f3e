"""The connectors through the suite of engine-sdk."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from loopback import free_port
from redis_server import Process, command

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine.interfaces.kv_connector import KVConnectorWorker
from engine_connectors.tcp.messages import Data
from engine_connectors.tcp.worker_half import TCPWorker
from engine_sdk.conformance import KVConnectorConformance
from engine_sdk.conformance.kv_connector.pair import Disturbance, Trouble

Frame = tuple[Any, Any, Any]
"""Of an exchange: the link, the message, its parts."""
FOLDER = tempfile.TemporaryDirectory()


class TestFile(KVConnectorConformance):
    driver, options, places = "file", {"path": FOLDER.name}, frozenset({"path"})

    @classmethod
    def lose(cls, workers: Sequence[KVConnectorWorker]) -> bool:
        """Remove all files."""
        for file in Path(FOLDER.name).rglob("*"):
            if file.is_file():
                file.unlink()
        return True


@pytest.mark.skipif(command() is None, reason="redis-server, or the client library redis, is not installed")
class TestRedis(KVConnectorConformance):
    driver, places = "redis", frozenset({"url"})

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """One for all tests."""
        process = Process(tmp_path_factory.mktemp("redis"))
        cls.options = {"url": process.url}
        yield
        process.end()

    @classmethod
    def lose(cls, workers: Sequence[KVConnectorWorker]) -> bool:
        """Empty the server."""
        import redis

        redis.Redis.from_url(str(cls.options["url"])).flushall()
        return True


class TestTCP(KVConnectorConformance):
    driver = "tcp"
    finds_by_key = False

    @pytest.fixture(autouse=True)
    def small_frames(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One page each, so that there are several of a transfer."""
        monkeypatch.setattr("engine_connectors.tcp.exchange.FRAME_BYTES", 1)

    @classmethod
    def ends(cls) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        hasty = {"timeout": 0.2, "push_timeout": 0.5}
        return {"port": free_port(), **hasty}, {"port": free_port(), **hasty}

    @classmethod
    def push(cls, name: str, receiver: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        named = {"push": True, "remote_request_id": name}
        place = {"remote_host": "127.0.0.1", "remote_port": receiver["port"]}
        return {"do_remote_decode": True, **named, **place}, {"do_remote_prefill": True, **named}

    @classmethod
    def disturb(cls, workers: Sequence[KVConnectorWorker], trouble: Trouble) -> bool:
        """By what an exchange tells."""

        def damaged(frame: Frame) -> Frame:
            link, message, parts = frame
            return link, message, [bytes([~parts[0][0] & 255]) + bytes(parts[0][1:]), *parts[1:]]

        for worker in cast("Sequence[TCPWorker]", workers):
            exchange = worker._exchange
            assert exchange is not None
            disturbance = Disturbance[Frame](trouble, damaged)
            exchange._tell = partial(_disturbed, exchange._tell, disturbance)  # type: ignore[method-assign]
        return True


def _disturbed(
    tell: Callable[..., None], disturb: Disturbance[Frame], link: Any, message: Any, parts: Any = ()
) -> None:
    frame = link, message, parts
    for one in disturb(frame) if isinstance(message, Data) else [frame]:
        tell(*one)
