"""The administrator's key opens what no API key does, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from gates import Echo, gate

from engine.types.errors import ConfigError
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle, Phase

PATHS = ("/admin", "/admin/", "/admin/plugins", "/admin/of/a/plugin")


def serving() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.phase = Phase.SERVING
    return lifecycle


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", PATHS)
async def test_only_the_administrators_key_opens_admin_routes(path: str) -> None:
    pages = [path]  # a plugin that marks its page as open opens nothing here
    async with gate(Echo(), serving(), KeyRing(("of-a-client",), admin="of-admin"), pages) as client:
        for headers in (bearer("of-admin"), {"x-api-key": "of-admin"}):
            assert (await client.get(path, headers=headers)).status_code == 200
        for headers in (bearer("of-a-client"), {"x-api-key": "of-a-client"}):
            refused = await client.get(path, headers=headers)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
        for headers in ({}, bearer(""), bearer("of-admi"), bearer("OF-ADMIN"), {"Authorization": "of-admin"}):
            assert (await client.get(path, headers=headers)).status_code == 401
        # Of two headers one counts, as everywhere: the other is not tried.
        both = {**bearer("of-admin"), "x-api-key": "of-a-client"}
        assert (await client.get(path, headers=both)).status_code == 403


@pytest.mark.parametrize("path", PATHS)
async def test_without_one_nobody_administers(path: str) -> None:
    for keys in (KeyRing(), KeyRing(("of-a-client",))):
        async with gate(Echo(), serving(), keys) as client:
            for headers in ({}, bearer(""), bearer("of-a-client"), bearer("None")):
                refused = await client.get(path, headers=headers)
                assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_disabled"


async def test_the_administrators_key_is_no_api_key() -> None:
    async with gate(Echo(), serving(), KeyRing(("of-a-client",), admin="of-admin")) as client:
        assert (await client.get("/v1/models", headers=bearer("of-admin"))).status_code == 401
        assert (await client.get("/administer", headers=bearer("of-a-client"))).status_code == 200
    async with gate(Echo(), serving(), KeyRing(admin="of-admin")) as client:  # open, but for the admin routes
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/admin/plugins")).status_code == 401


async def test_an_administrator_waits_for_the_model_too() -> None:
    lifecycle = Lifecycle()
    async with gate(Echo(), lifecycle, KeyRing(admin="of-admin")) as client:
        assert (await client.get("/admin/plugins", headers=bearer("of-admin"))).status_code == 503
        assert (await client.get("/admin/plugins")).status_code == 401
    assert lifecycle.active == 0


def test_one_key_for_both_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- of-admin\n")
    for given in ({"keys": ("x", "of-admin")}, {"path": str(path)}):
        with pytest.raises(ConfigError, match="one key for both") as caught:
            KeyRing(**given, admin="of-admin")  # type: ignore[arg-type]
        assert "of-admin" not in str(caught.value)
    with pytest.raises(ConfigError, match="blank"):
        KeyRing(admin="  ")
    path.write_text("- of-a-client\n")
    ring = KeyRing(path=str(path), admin="of-admin")
    path.write_text("- of-a-client\n- of-admin\n- newcomer\n")
    ring.look()
    assert ring.find(b"Bearer of-a-client") and not ring.find(b"Bearer of-admin") and not ring.find(b"Bearer newcomer")
