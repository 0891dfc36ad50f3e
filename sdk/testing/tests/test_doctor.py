"""`engine plugins doctor`: each ailment is found, named and has a remedy; what is broken harms nobody else."""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.plugin import POINTS, Candidate
from engine_sdk.probe import plain_need, probe

STRANGERS = runpy.run_path(str(Path(__file__).parents[3] / "core" / "tests" / "cli" / "strangers.py"))
CARDS, install = STRANGERS["CARDS"], STRANGERS["install"]


@pytest.fixture
def program(capsys, monkeypatch):
    """Run in this process: exit code, standard output, standard error."""
    for name in [name for name in os.environ if name.startswith("ENGINE_")]:
        monkeypatch.delenv(name)

    def run(*arguments):
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    "some", [("--plugins", "engine-reference,engine-sdk"), pytest.param((), id="all", marks=pytest.mark.slow)]
)
def test_a_sound_installation(program, some):
    """Of all, the suites say as much of each card."""
    code, out, _ = program("plugins", "doctor", *some)
    assert code == 0 and "all are sound" in out


@pytest.mark.slow
def test_every_ailment(program, tmp_path, monkeypatch):
    install(tmp_path, *(name for name in CARDS if name not in ("stranger", "unfit")))
    install(tmp_path, "stranger", "sound", distribution="engine-mars")
    install(tmp_path, "unfit", major=4, distribution="engine-pluto")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, out, _ = program("plugins", "doctor", "--json", "--timeout", "20")
    assert code == 1
    found = {(a["where"].split("'")[1], a["kind"]): a for a in json.loads(out)["ailments"]}
    assert set(found) == {
        ("broken", "broken"), ("syntax", "broken"), ("crashes", "broken"), ("hangs", "broken"), ("heavy", "heavy"),
        ("slow", "slow"), ("stranger", "broken"), ("raises", "broken"), ("sound", "duplicate"), ("unfit", "outdated"),
    }  # fmt: skip
    assert all(ailment["found"] and ailment["remedy"] for ailment in found.values())
    assert "pip install module_that_nobody_has" in found["broken", "broken"]["remedy"]
    assert "exit code 7" in found["crashes", "broken"]["found"]
    assert "not done after 20 s" in found["hangs", "broken"]["found"]
    assert "torch" in found["heavy", "heavy"]["found"]
    assert (
        "engine-moon" in found["sound", "duplicate"]["found"] and "engine-mars" in found["sound", "duplicate"]["found"]
    )
    assert "v4" in found["unfit", "outdated"]["found"]


def test_the_text(program, tmp_path, monkeypatch):
    install(tmp_path, "broken")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, out, _ = program("plugins", "doctor", "--plugins", "engine-moon,engine-sdk")  # of all it is asked above
    assert code == 1
    assert "1 to mend" in out and "broken: 'broken' of evictor (engine-moon 1.2)" in out and "to do: install" in out


HOOKS = """
from engine.interfaces.evictor import EvictorCard
from engine.plugin import hookimpl

class Raises(EvictorCard):
    @classmethod
    def unsupported(cls, need):
        return [{}['moon']]

class Misspelt:
    @hookimpl
    def step_dome(self, stats): ...

class Elsewhere:
    @hookimpl
    def admit(self, request): ...

class Arguments:
    @hookimpl
    def step_done(self, statistics): ...

class Waits:
    @hookimpl
    async def step_done(self, stats): ...

class Unmarked:
    def step_done(self, stats): ...

class NearlyUnmarked:
    def steps_done(self, stats): ...

class Sound:
    def __init__(self):
        raise RuntimeError("the doctor builds nothing")

    @hookimpl
    def step_done(self, stats): ...

    @hookimpl
    def kv_events(self): ...

    def step_done_again(self, stats): ...

    def steps(self, count): ...

    def _kv_event(self, events): ...
"""


def hook(name: str) -> Candidate:
    return Candidate("hooks.core", name.lower(), 0, "engine-ears", "2.0", f"moon_ears:{name}")


@pytest.fixture
def ears(tmp_path, monkeypatch):
    (tmp_path / "moon_ears.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("moon_ears", None)


@pytest.mark.parametrize(
    ("name", "kind", "found", "remedy"),
    [
        ("Misspelt", "broken", "'step_dome', which is no hook of core", "did you mean 'step_done'?"),
        ("Elsewhere", "broken", "'admit', which is no hook of core", "register the plugin in engine.hooks.frontend.v0"),
        ("Arguments", "broken", "statistics", "pip install --upgrade engine-ears"),
        ("Waits", "broken", "coroutine function", "pip install --upgrade engine-ears"),
        ("Unmarked", "unmarked", "step_done looks like the hook step_done", "put @hookimpl (from engine.plugin) above"),
        ("NearlyUnmarked", "unmarked", "steps_done looks like the hook step_done", "call it step_done, or give it"),
    ],
)
def test_what_is_wrong_with_a_hook_plugin(ears, name, kind, found, remedy):
    finding = probe(hook(name))
    assert finding.kind == kind and found in finding.found and remedy in finding.remedy
    assert f"moon_ears:{name}" in finding.found


def test_a_sound_hook_plugin_is_not_built_and_may_have_functions_of_its_own(ears):
    assert probe(hook("Sound")).found == ""


def test_a_module_may_import_what_is_called_like_a_hook(tmp_path, ears):
    (tmp_path / "moon_ears.py").write_text("from json import loads as step_done\n")
    assert probe(replace(hook(""), value="moon_ears")).found == ""


def test_a_card_that_cannot_answer_is_told_of_with_the_line(tmp_path, ears):
    found = probe(Candidate("evictor", "moon", 0, "engine-moon", "1.2", "moon_ears:Raises"))
    line = HOOKS.splitlines().index("        return [{}['moon']]") + 1
    assert found.kind == "broken" and "has to return a list of reasons" in found.remedy
    assert found.found.startswith(f"its unsupported() raised KeyError: 'moon' at {tmp_path}/moon_ears.py:{line} (moon_")


@pytest.mark.parametrize("point", POINTS)
def test_each_point_has_a_need_to_ask_its_cards_for(point):
    need = plain_need(point)
    assert (need is None) == (point in ("checkpoint", "evictor", "grammar", "scheduling_policy"))


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "soon"])
def test_a_nonsensical_timeout_is_refused(program, timeout):
    with pytest.raises(SystemExit):
        program("plugins", "doctor", "--timeout", timeout)
