"""`--plugins` on the command line, in the file and in the environment: every command follows it."""

from __future__ import annotations

import importlib
import json

import pytest

from engine.config.settings import EngineConfig
from engine.config.sources import gather

from .strangers import install


@pytest.fixture
def moon(tmp_path, monkeypatch):
    """A distribution whose driver and command cannot be imported without a trace."""
    install(tmp_path, "sound", "broken")
    info = tmp_path / "engine_moon-1.2.dist-info" / "entry_points.txt"
    info.write_text(info.read_text() + "[engine.commands.v0]\nhowl = moon_howl:Howl\n")
    (tmp_path / "moon_howl.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nraise RuntimeError('howl')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "file", "variable", "expected"),
    [
        ({"plugins": "a,-b"}, None, "c", ("a,-b", "flag --plugins")),
        ({"plugins": ["a", "-b"]}, None, None, ("a,-b", "flag --plugins")),
        ({}, "plugins: [a, -b]", "c", ("a,-b", "file {}:1")),
        ({}, "plugins: a,-b", None, ("a,-b", "file {}:1")),
        ({}, None, "a, -b", ("a, -b", "environment ENGINE_PLUGINS")),
        ({}, None, None, ("", "")),
    ],
)
def test_the_sources(tmp_path, flags, file, variable, expected):
    path = tmp_path / "engine.yaml"
    path.write_text(file or "")
    merged = gather(flags, str(path), {"ENGINE_PLUGINS": variable} if variable else {})
    for plugins in (merged.plugin_list, EngineConfig.from_merged(merged).plugin_list):
        assert (plugins.text, plugins.origin) == (expected[0], expected[1].format(path))


def test_python_takes_a_text_or_a_list():
    assert EngineConfig(plugins=["engine-tiny", "-hooks:otel"]).plugin_list.text == "engine-tiny,-hooks:otel"
    assert EngineConfig(plugins="engine").plugins == "engine" and EngineConfig().plugin_list.entries == ()


def test_the_table_marks_what_is_denied(program, moon, monkeypatch):
    monkeypatch.setenv("ENGINE_PLUGINS", "-engine-moon")
    code, out, _ = program("plugins", "--evictor", "sound")
    assert code == 0 and "denied by --plugins -engine-moon (environment ENGINE_PLUGINS)" in out
    lines = [line.split(maxsplit=3) for line in out.splitlines() if " engine-moon " in line]
    assert [line[:2] + line[3:] for line in lines if line[0] == "broken"] == [
        ["broken", "engine-moon", "denied; '-engine-moon' denies it"]
    ]
    assert any("denied, asked (flag --evictor); '-engine-moon' denies it" in line for line in out.splitlines())
    rows = {row["driver"]: row for row in json.loads(program("plugins", "--json")[1])["drivers"]}
    assert rows["howl"]["choice"] == rows["sound"]["choice"] == "denied"
    assert not (moon / "imported").exists()


def test_flags_with_a_minus_are_read_apart_or_with_an_equals_sign(program, moon):
    apart, joined = ["--plugins", "-engine-moon"], ["--plugins=-engine-moon"]
    for flags in (apart, joined, ["--plugins", "engine", *apart]):
        code, out, err = program("plugins", "--json", *flags)
        assert code == 0, err
        assert {r["driver"]: r["choice"] for r in json.loads(out)["drivers"]}["sound"] == "denied"
    code, _, err = program("plugins", "--plugins")
    assert code == 2 and "no value follows it" in err


def test_a_slip_is_an_error_everywhere(program, moon):
    for command in (["plugins"], ["plugins", "doctor"], ["plugins", "why", "evictor"], ["generate", "hi"]):
        code, _, err = program(*command, "--plugins", "-engine-mon")
        assert code == 2 and "did you mean 'engine-moon'" in err, command


def test_why_gives_the_verdict(program, moon):
    code, out, _ = program("plugins", "why", "evictor", "--plugins", "-evictor:sound")
    assert code == 0
    [line] = [line for line in out.splitlines() if line.startswith("sound")]
    assert "denied" in line and "'-evictor:sound' denies it: --plugins -evictor:sound (flag --plugins)" in line
    told = json.loads(program("plugins", "why", "evictor", "--json", "--plugins", "engine,engine-tiny")[1])
    assert {c["driver"]: c["verdict"] for c in told["candidates"]}["broken"] == "denied"


@pytest.mark.slow
def test_doctor_does_not_look_at_it(program, moon):
    code, out, _ = program("plugins", "doctor", "--plugins", "engine,engine-sdk")
    assert code == 0 and "denied, and not looked at (--plugins engine,engine-sdk (flag --plugins)):" in out
    assert "'broken' of evictor (engine-moon 1.2): no entry allows it" in out
    told = json.loads(program("plugins", "doctor", "--json", "--plugins", "engine,engine-sdk,engine-moon")[1])
    assert "engine-moon" not in {d["where"] for d in told["denied"]} and told["ailments"]


def test_commands_follow_it(program, moon, tmp_path, monkeypatch):
    code, _, err = program("howl", "--plugins", "-commands:howl")
    assert code == 2 and "use plugin 'howl' for commands" in err and "'-commands:howl' denies it" in err
    path = tmp_path / "engine.yaml"
    path.write_text("plugins: engine\n")
    code, _, err = program("howl", "--config", str(path))
    assert code == 2 and f"no entry allows it: --plugins engine (file {path}:1)" in err
    monkeypatch.setenv("ENGINE_PLUGINS", "engine")
    assert "howl" not in program("--help")[1]
    assert not (moon / "imported").exists()
    monkeypatch.delenv("ENGINE_PLUGINS")
    assert "RuntimeError: howl" in program("howl")[2] and (moon / "imported").exists()


def test_help_comes_with_a_wrong_list_too(program, monkeypatch):
    monkeypatch.setenv("ENGINE_PLUGINS", "-engine-mon")
    code, out, _ = program("--help")
    assert code == 0 and "List the points" in out and "deny 'engine-mon'" in out
