"""`nixl` through the suite of engine-sdk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import pytest
from nixl_here import free_port, why_not

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine.interfaces.kv_connector import KVConnectorWorker
from engine_connectors.tcp.messages import Data
from engine_nixl.worker_half import NixlWorker
from engine_sdk.conformance import KVConnectorConformance
from engine_sdk.conformance.kv_connector.pair import Disturbance, Trouble

Frame = tuple[Any, Any, Any]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
class TestNixl(KVConnectorConformance):
    driver = "nixl"
    finds_by_key = False

    @pytest.fixture(autouse=True)
    def small_windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of one page each, so that there are several answers to a transfer."""
        monkeypatch.setattr("engine_connectors.tcp.exchange.WINDOW_BYTES", 1)

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
        """What tells where pages lie, and that they are held."""

        def damaged(frame: Frame) -> Frame:
            link, message, parts = frame
            if not parts:
                return link, Data(message.transfer, message.question, 0, [], ~message.checksum & 0xFFFF), parts
            return link, message, [bytes([~parts[0][0] & 255]) + bytes(parts[0][1:])]

        for worker in cast("Sequence[NixlWorker]", workers):
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
