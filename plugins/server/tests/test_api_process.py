"""What the first process and an API process do with what the other says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_server.keys import KeyLimits, KeyRing
from engine_server.processes.channel import ApiStart, Tell
from engine_server.processes.child import ApiServer
from engine_server.processes.parent import Parent as First


class Parent:
    """Hears nothing that is said."""

    def send(self, message: Any) -> None: ...


def process(replaces: bool) -> ApiServer:
    parent: Any = Parent()
    facts: Any = {"number": 0, "client": 1, "core": None, "num_cores": 1, "listener": -1}
    start = ApiStart(**facts, config="{}", settings="{}", asks_for_key=True, replaces=replaces)
    return ApiServer(start, parent)


async def test_nobody_is_heard_before_the_keys_are_there() -> None:
    first, later = process(replaces=False), process(replaces=True)
    for one in (first, later):
        assert not one._may_listen.is_set(), "a key that fits would be refused"
        one._channel.hear(Tell("keys", [[[b"digest", "team", False]]]))
        assert [key.name for key in one._keys._keys.values()] == ["team"]
    assert first._may_listen.is_set() and not later._may_listen.is_set()
    later._channel.hear(Tell("serve", []))
    assert later._may_listen.is_set()


def test_a_key_that_goes_and_comes_back_has_nothing_in_progress(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- team\n")
    first: Any = First.__new__(First)
    first._keys = KeyRing(path=str(path), limits=KeyLimits(max_concurrent_requests=1))
    told = SimpleNamespace(held=Counter(), channel=SimpleNamespace(tell=lambda *_: None))
    first._processes = {0: told}
    first._keys.on_change.append(first._tell_keys)
    ((key, _),) = first._keys.known()
    assert first._enter(told, key.digest) is None
    for keys in ("- other\n", "- team\n"):
        path.write_text(keys)
        first._keys.look(changed=True)
    first._release(told, key.digest)
    assert first._keys.usage(key.digest).active == 0, "the request that has ended now was the old key's"
    assert first._enter(told, key.digest) is None
    status, _, code, _ = first._enter(told, key.digest)
    assert (status, code) == (429, "rate_limit_exceeded")
