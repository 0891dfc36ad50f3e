"""What a server says of itself holds no secret."""

from __future__ import annotations

from engine_server.operations import HIDDEN, without_secrets


def test_options_that_may_be_secrets_are_hidden() -> None:
    options = {
        "kv_connector": {"url": "redis://me:pw@store:6379/0", "Password": "pw", "api_key": None, "ttl": 3},
        "x": {"nested": {"auth_header": ["pw"], "hosts": ["http://a:pw@b/", "c"]}, "on": True, "path": "/a@b"},
        "y": ["redis://me:p@w@store/0", "redis://store/0?ttl=3&password=pw#x", "http://b?mail=a@b"],
    }
    assert without_secrets(options) == {
        "kv_connector": {"url": f"redis://{HIDDEN}@store:6379/0", "Password": HIDDEN, "api_key": None, "ttl": 3},
        "x": {"nested": {"auth_header": HIDDEN, "hosts": [f"http://{HIDDEN}@b/", "c"]}, "on": True, "path": "/a@b"},
        "y": [f"redis://{HIDDEN}@store/0", f"redis://store/0?ttl=3&password={HIDDEN}#x", "http://b?mail=a@b"],
    }
