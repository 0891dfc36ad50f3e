"""The server's settings: the same sources, their own section, never mixed up with the engine's."""

from __future__ import annotations

import pytest

from engine.config.declaration import EngineSettings
from engine.config.settings import EngineConfig
from engine.config.sources import Key, gather, resolve
from engine.frontend.launch import launch
from engine.plugin.points import POINTS
from engine.types.errors import ConfigError, OptionsError
from engine_server.commands import give_role
from engine_server.config import ServerConfig
from engine_server.run import serve
from engine_server.settings import ServerSettings


def test_no_name_is_taken_twice():
    names = [*EngineSettings.declared, *ServerSettings.declared] + [p.keyword for p in POINTS.values()]
    assert len(set(names)) == len(names) and not {"server", "points", "options", "config"} & set(names)


def test_precedence_with_provenance(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text("max_num_seqs: 2\nserver:\n  host: h\n  port: 2\n  shutdown-timeout: 0.5\n")
    environ = {"ENGINE_PORT": "1", "ENGINE_SERVER__HOST": "env", "ENGINE_API_KEY": "k"}
    merged = gather({"port": "3"}, str(path), environ)
    config = ServerConfig.from_merged(merged)
    assert (config.host, config.port, config.shutdown_timeout, config.api_key) == ("h", 3, 0.5, ("k",))
    assert merged.origins == {
        Key("settings", "max_num_seqs"): f"file {path}:1",
        Key("settings", "host"): f"file {path}:3",
        Key("settings", "port"): "flag --port",
        Key("settings", "shutdown_timeout"): f"file {path}:5",
        Key("settings", "api_key"): "environment ENGINE_API_KEY",
    }
    assert EngineConfig.from_merged(merged) == EngineConfig(max_num_seqs=2)


def test_flat_keys_and_spellings():
    assert resolve("host") == resolve("server.host") == Key("settings", "host")
    assert resolve("shutdown_timeout").flag == "--shutdown-timeout"
    assert gather({}, None, {"ENGINE_HOST": "a"}).section("settings") == {"host": "a"}
    assert ServerConfig(host="a", **{"shutdown-timeout": 3}) == ServerConfig(
        server={"host": "a", "shutdown_timeout": 3}
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("server:\n  hots: x\n", r"e\.yaml:2.*did you mean 'host'"),
        ("server:\n  attention: x\n", r"e\.yaml:2.*the server has no such setting"),
        ("server: x\n", r"e\.yaml:1.*not a mapping"),
        ("host: a\nserver:\n  host: b\n", r"e\.yaml:3.*set twice"),
    ],
)
def test_names_that_cannot_be_understood(tmp_path, text, says):
    path = tmp_path / "e.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        gather({}, str(path), {})


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"port": "many"}, "set port to 'many'"),
        ({"port": 65536}, "less than or equal to 65535"),
        ({"shutdown_timeout": float("inf")}, "finite"),
        ({"shutdown_timeout": -1}, "greater than or equal to 0"),
        ({"dtype": "float32"}, "pass it to EngineConfig"),
        ({"attention": "x"}, "pass it to EngineConfig"),
    ],
)
def test_bad_values(keywords, says):
    with pytest.raises(ConfigError, match=says):
        ServerConfig(**keywords)


def test_a_secret_is_not_shown_in_an_error():
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key={"hunter2": 1})
    assert "hunter2" not in str(caught.value) and "set api_key" in str(caught.value)
    assert "hunter2" not in repr(ServerConfig(api_key="hunter2"))


def test_an_engine_takes_no_setting_of_the_server():
    with pytest.raises(ConfigError, match="set 'host' with EngineConfig; it is a setting of the server; leave it out"):
        EngineConfig(host="x")


def test_the_service_links_of_kubernetes_are_no_settings():
    merged = gather({}, None, {"ENGINE_PORT": "tcp://10.0.0.7:8000", "ENGINE_PORT_8000_TCP": "tcp://10.0.0.7:8000"})
    assert merged.values == {} and "service link" in merged.warnings[0]


def test_the_role_is_the_connectors_option():
    merged = gather({"kv_connector": "tcp", "kv_role": "prefill"}, None, {})
    give_role(merged)
    assert EngineConfig.from_merged(merged).options == {"kv_connector": {"role": "prefill"}}
    assert ServerConfig.from_merged(merged).kv_role == "prefill"
    plain = gather({"kv_connector": "tcp"}, None, {})
    give_role(plain)
    assert EngineConfig.from_merged(plain).options == {}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "set kv_role to 'decode'; no connector is named"),
        ({"kv_connector": "tcp", "kv_connector.role": "prefill"}, "set kv_role to 'decode'; .*role is 'prefill'"),
    ],
)
def test_a_role_that_nobody_can_have(more, says):
    with pytest.raises(ConfigError, match=says):
        give_role(gather({"kv_role": "decode", **more}, None, {}))


def test_a_role_that_the_engine_does_not_have_is_not_served():
    """Who calls `serve` in Python has made the engine's settings already."""
    config = EngineConfig(model="tiny", kv_connector="tcp", **{"kv_connector.role": "both"})
    with pytest.raises(ConfigError, match=r"kv_role='decode'; .*role is 'both'.*; name it there"):
        serve(config, ServerConfig(kv_role="decode"))


def test_a_role_of_a_connector_that_has_none():
    merged = gather({"model": "tiny", "kv_connector": "file", "kv_role": "decode"}, None, {})
    give_role(merged)
    with pytest.raises(OptionsError, match=r"kv_connector\.role to 'decode'; .*'file'.* has no such option"):
        launch(EngineConfig.from_merged(merged))
