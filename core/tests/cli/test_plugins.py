"""`engine plugins`: what is installed, what is configured, and what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine.cli.plugins import render, table
from engine.config.sources import gather
from engine.plugin.discovery import Candidate, Registry
from engine.plugin.points import POINTS


def test_every_point_with_its_drivers(program):
    code, out, _ = program("plugins")
    assert code == 0
    for point in POINTS:
        assert any(line.startswith(point) for line in out.splitlines())
    assert "LlamaForCausalLM" in out and "engine-tiny" in out and "auto" in out


def test_configured_choices_say_where_they_were_made(program, tmp_path, monkeypatch):
    path = tmp_path / "engine.yaml"
    path.write_text("evictor: lru\n")
    monkeypatch.setenv("ENGINE_EXECUTOR", "inline")
    code, out, _ = program("plugins", "--config", str(path), "--attention=flash", "--json")
    assert code == 0
    report = json.loads(out)
    rows = {(row["point"], row["driver"]): row for row in report["drivers"]}
    assert rows["evictor", "lru"]["choice"] == f"asked (file {path}:1)"
    assert rows["executor", "inline"]["choice"] == "asked (environment ENGINE_EXECUTOR)"
    assert rows["attention", "flash"]["note"] == "not installed"
    assert rows["attention", "flash"]["choice"] == "asked (flag --attention)"
    assert rows["attention", "torch"]["choice"] == ""
    assert rows["ops", "torch"]["choice"] == "auto"
    assert report["configured"]["attention"] == {"choice": "flash", "origin": "flag --attention"}


@pytest.mark.parametrize(("choice", "names"), [("a,b", {"a", "b"}), ("full=a,sliding=auto", {"a"}), ("auto", set())])
def test_lists_and_kinds_are_read(choice, names):
    rows = table(Registry([]), gather({"attention": choice}, None, {}))
    assert {row.driver for row in rows if row.choice.startswith("asked")} == names


def test_outdated_and_doubled_drivers_are_marked():
    lru = Candidate("evictor", "lru", 0, "engine", "1", "a:A")
    found = [lru, replace(lru, distribution="fork"), replace(lru, name="old", major=4, distribution="stale")]
    rows = {(r.driver, r.distribution): r for r in table(Registry(found), gather({}, None, {}))}
    assert "more than once" in rows["lru", "fork"].note and "more than once" in rows["lru", "engine"].note
    assert rows["old", "stale"].note == "speaks v4, this core serves v0"
    assert "! speaks v4" in render(list(rows.values()))


def test_broken_metadata_is_shown(program, tmp_path, monkeypatch):
    info = tmp_path / "pg_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pg-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[engine.evictor.v0]\nno equals sign\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = program("plugins")
    assert code == 0 and "! pg_broken: its metadata cannot be read" in out
    assert json.loads(program("plugins", "--json")[1])["problems"][0]["distribution"] == "pg_broken"


def test_hooks_and_commands_are_listed():
    hook = Candidate("hooks.core", "otel", 0, "engine-otel", "2", "a")
    command = Candidate("commands", "hello", 0, "engine-hello", "3", "a:A")
    out = render(table(Registry([hook, command]), gather({}, None, {})))
    assert "hooks.core" in out and "engine-otel" in out and "commands" in out and "engine-hello" in out


def test_slips_in_the_environment_are_warned_of(program, monkeypatch):
    monkeypatch.setenv("ENGINE_ATENTION", "flash")
    code, _, err = program("plugins")
    assert code == 0 and "ENGINE_ATENTION" in err and "'attention'" in err
