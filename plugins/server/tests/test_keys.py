"""API keys: whose request it is, what a key may ask for, and a file that changes while the server runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from gates import Echo, gate

from engine.types.errors import ConfigError
from engine_server.keys import KeyLimits, KeyRing, OwnUsage, read_key_file
from engine_server.lifecycle import Lifecycle, Phase

FILE = """\
- plain
- key: of-a-team
  name: team
  requests_per_minute: 3
  max_concurrent_requests: 2
- {"key": "json too"}
"""


def serving() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.phase = Phase.SERVING
    return lifecycle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "keys.yaml"
    written.write_text(FILE)
    return written


def test_keys_of_flags_and_file(path: Path) -> None:
    ring = KeyRing(["given"], str(path), KeyLimits(requests_per_minute=60))
    assert ring and not KeyRing()
    for key in ("given", "plain", "of-a-team", "json too"):
        found = ring.find(b"Bearer " + key.encode())
        assert found is not None and ring.find(b"nonsense", key.encode()) is found
    for header in (b"", b"plain", b"Basic plain", b"Bearer plai", b"Bearer plainn", b"Bearer PLAIN", b"Bearer \xff"):
        assert ring.find(header) is None
    team, plain = ring.find(b"bearer of-a-team"), ring.find(b"BEARER  plain ")
    assert team is not None and plain is not None
    assert (team.name, team.usage.limits) == ("team", KeyLimits(3, 2))
    assert plain.usage.limits == KeyLimits(60, None) and "plain" not in repr(plain)
    assert team.cache_salt != plain.cache_salt and "team" not in team.cache_salt


def test_a_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    empty = tmp_path / "keys.yaml"
    empty.write_text("# none yet\n")
    ring = KeyRing((), str(empty))
    assert ring and ring.find(b"Bearer ") is None and ring.find(b"") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("secret: 1", "it holds a dict, not a list"),
        ("- [secret]", "entry 1 has no key that is a text"),
        ("- a\n- 17", "entry 2 has no key that is a text"),
        ("- ''", "entry 1 has no key"),
        ("- {key: secret, requests_per_minutes: 3}", "entry 1 has the field 'requests_per_minutes'"),
        ("- {key: secret, requests_per_minute: 0}", "requests_per_minute of entry 1 is 0"),
        ("- {key: secret, max_concurrent_requests: true}", "max_concurrent_requests of entry 1 is True"),
        ("- {key: secret, name: [x]}", "the name of entry 1 is no text"),
        ("- secret\n  -: {", "it is not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, found: str) -> None:
    wrong = tmp_path / "keys.yaml"
    wrong.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_key_file(str(wrong))
    assert found in str(caught.value) and str(wrong) in str(caught.value) and "secret" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        KeyRing((), str(tmp_path / "none"))


def test_a_changed_file_is_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ring = KeyRing(["given"], str(path))
    team = ring.find(b"Bearer of-a-team")
    assert team is not None and team.usage.enter() is None
    path.write_text("- key: of-a-team\n  max_concurrent_requests: 1\n- new\n")
    ring.look()
    again = ring.find(b"Bearer of-a-team")
    assert again is not None and again.usage.enter() is not None  # the request in progress still counts
    assert ring.find(b"Bearer new") and ring.find(b"Bearer given") and ring.find(b"Bearer plain") is None
    with caplog.at_level(logging.ERROR):
        path.write_text("nonsense: true and much longer\n")
        ring.look()
        ring.look()
        path.unlink()
        ring.look()
    assert [record.levelname for record in caplog.records].count("ERROR") == 2  # each state is told once
    assert ring.find(b"Bearer new") and ring.find(b"Bearer given")


def test_a_file_behind_a_link_is_noticed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"- {name}\n")
    link = tmp_path / "keys"
    link.symlink_to(tmp_path / "one")
    ring = KeyRing((), str(link))
    (tmp_path / "next").symlink_to(tmp_path / "two")
    (tmp_path / "next").replace(link)
    ring.look()
    assert ring.find(b"Bearer two") and not ring.find(b"Bearer one")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_a_minute() -> None:
    clock = Clock()
    usage = OwnUsage(KeyLimits(requests_per_minute=3), clock)

    def ask() -> str | None:
        error = usage.enter()
        if error is None:
            usage.leave()
            return None
        assert error.status == 429 and error.code == "rate_limit_exceeded"
        return error.headers["Retry-After"]

    assert [ask() for _ in range(4)] == [None, None, None, "20"]
    clock.now += 19.5
    assert ask() == "1"
    clock.now += 0.5
    assert [ask(), ask()] == [None, "20"]
    clock.now += 3600
    assert [ask() for _ in range(4)] == [None, None, None, "20"]


def test_requests_at_once() -> None:
    usage = OwnUsage(KeyLimits(max_concurrent_requests=2))
    assert usage.enter() is None and usage.enter() is None
    assert usage.enter() is not None and usage.active == 2
    usage.leave()
    assert usage.enter() is None


async def test_the_gate_counts_by_key() -> None:
    echo, ring = Echo(), KeyRing(["one", "two"], limits=KeyLimits(max_concurrent_requests=1))
    echo.go.clear()
    async with gate(echo, serving(), ring) as client:

        def post(key: str) -> asyncio.Task[int]:
            async def status() -> int:
                answer = await client.post("/v1/completions", content=b"x", headers={"Authorization": f"Bearer {key}"})
                assert (answer.status_code == 429) == ("retry-after" in answer.headers)
                return answer.status_code

            return asyncio.ensure_future(status())

        first = post("one")
        await asyncio.sleep(0)
        while not ring.find(b"Bearer one").usage.active:  # type: ignore[union-attr]
            await asyncio.sleep(0)
        assert await post("one") == 429 and await post("three") == 401
        second = post("two")
        echo.go.set()
        assert await asyncio.gather(first, second) == [200, 200]
        assert await post("one") == 200


async def test_the_application_learns_whose_request_it_is() -> None:
    seen: list[dict[str, str]] = []

    class Looks(Echo):
        async def __call__(self, scope, receive, send):  # type: ignore[no-untyped-def]
            seen.append(scope.get("state", {}))
            await super().__call__(scope, receive, send)

    async with gate(Looks(), serving(), KeyRing(["one", "two"])) as client:
        for header in ({"Authorization": "Bearer one"}, {"x-api-key": "two"}):
            assert (await client.post("/", content=b"x", headers=header)).status_code == 200
    assert len({state["cache_salt"] for state in seen}) == 2 and len({state["api_key"] for state in seen}) == 2


def test_looking_stops_without_a_file() -> None:
    asyncio.run(asyncio.wait_for(KeyRing(["a"]).watch(), 1))
