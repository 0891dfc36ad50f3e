"""`engine plugins`: what is installed, what is configured, and what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from core.tests.cli.strangers import install

from engine.config.sources import gather
from engine.plugin.candidate import Candidate
from engine.plugin.discovery import Registry
from engine.plugin.points import POINTS
from engine_inspect.plugins import render, table


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
    code, out, _ = program("plugins", "--config", str(path), "--attention=strangers", "--json")
    assert code == 0
    report = json.loads(out)
    rows = {(row["point"], row["driver"]): row for row in report["drivers"]}
    assert rows["evictor", "lru"]["choice"] == f"asked (file {path}:1)"
    assert rows["executor", "inline"]["choice"] == "asked (environment ENGINE_EXECUTOR)"
    assert rows["attention", "strangers"]["note"] == "not installed"
    assert rows["attention", "strangers"]["choice"] == "asked (flag --attention)"
    assert rows["attention", "torch"]["choice"] == ""
    assert rows["ops", "torch"]["choice"] == "auto"
    assert report["configured"]["attention"] == {"choice": "strangers", "origin": "flag --attention"}


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


def test_what_a_distribution_needs_and_lacks_is_shown_without_an_import(program, tmp_path, monkeypatch):
    install(tmp_path, "sound")
    metadata = tmp_path / "engine_moon-1.2.dist-info" / "METADATA"
    needs = ("A.Lib>=3", "NumPy (>=1)", "other; extra == 'x'", "tomli; python_version < '3'")
    metadata.write_text(metadata.read_text() + "".join(f"Requires-Dist: {need}\n" for need in needs) + "\nName: text\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, out, _ = program("plugins")
    assert (
        code == 0 and "! engine-moon 1.2: it needs 'A.Lib', which is not installed\n  to do: pip install A.Lib" in out
    )
    [line] = [line for line in out.splitlines() if "sound" in line]
    assert line.endswith("auto; ! needs 'A.Lib', which is not installed")
    assert sum("engine-moon" in line and "which is not installed" in line for line in out.splitlines()) == 2


HEAVY = {"torch", "numpy", "pydantic", "msgspec", "stevedore", "pluggy", "typer", "rich", "yaml"}


def test_thirty_plugins_are_listed_and_nothing_of_them_is_imported(tmp_path, monkeypatch):
    """How long that takes is measured by docs/benchmarks/measure_plugins.py."""
    for number in range(30):
        name = f"pg_stranger{number}"
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        groups = ("evictor", "hooks.core", "hooks.frontend", "commands")
        entries = (f"[engine.{group}.v0]\nstranger{number} = {name}:Card\n" for group in groups)
        (info / "entry_points.txt").write_text("".join(entries))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "import sys; from engine.cli.main import main; main(['plugins']); "
        "print(sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *table_, modules = done.stdout.splitlines()
    for number in range(30):
        assert sum(f"pg_stranger{number} " in line for line in table_) == 4
        assert f"'pg_stranger{number}'" not in modules
    assert not (tmp_path / "imported").exists()
    assert not [name for name in (*HEAVY, "engine_reference") if f"'{name}'" in modules]


def test_the_doctor_comes_with_the_sdk(program, monkeypatch):
    monkeypatch.setattr(Registry, "discover", classmethod(lambda cls, *_, **__: cls()))
    code, _, err = program("plugins", "doctor")
    assert code == 2 and "pip install engine-sdk" in err
