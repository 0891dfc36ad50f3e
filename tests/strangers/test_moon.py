"""A stranger's plugin, for real: built into a wheel, installed beside our own wheels into an environment of its own,
with no source tree in sight; selected, serving, upgraded, broken in each way, and removed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ..serving.conftest import Server
from .house import OURS, House
from .package import write

MISSPELT = """
from engine.plugin import hookimpl


class Listener:
    @hookimpl
    def step_dome(self, stats):
        pass
"""
pytestmark = pytest.mark.xdist_group("moon")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("house"), OURS)


@pytest.fixture(scope="module")
def first_moon(house: House, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of version 1.0."""
    (wheel,) = house.build(write(tmp_path_factory.mktemp("stranger") / "moon", "1.0"))
    return wheel


@pytest.fixture(scope="module")
def installed(house: House, first_moon: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip makes of that wheel, in a folder beside the environment: to install takes seconds."""
    house.install(first_moon)
    aside = tmp_path_factory.mktemp("installed")
    for folder in house.site.glob("engine_moon*"):
        shutil.move(folder, aside)
    return aside


@contextlib.contextmanager
def risen(house: House, installed: Path) -> Iterator[Path]:
    """Version 1.0 is installed; its folder in the environment."""
    shutil.copytree(installed, house.site, dirs_exist_ok=True)
    yield house.site / "engine_moon"
    for folder in house.site.glob("engine_moon*"):
        shutil.rmtree(folder)


@pytest.fixture
def moon(house: House, installed: Path) -> Iterator[Path]:
    with risen(house, installed) as folder:
        yield folder


def says(server: Server) -> str:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(server.address + "/v1/completions", json=body, timeout=60).raise_for_status().json()
    return str(answer["choices"][0]["text"])


@pytest.fixture(scope="module")
def without_it(house: House, installed: Path) -> str:
    """What the model says where the plugin is denied. Also what is broken in it is not told of: nothing of it is
    imported."""
    with risen(house, installed) as moon:
        (moon / "hooks.py").write_text("raise RuntimeError('the moon is deaf')")
        server = house.serve("tiny", "--plugins", "engine,engine-tiny", "--verbose")
        said = says(server)
        assert said and server.metrics()["quarantined_drivers"] == 0
        assert server.stop() == 0
    banner = "".join(server.lines)
    assert "engine,engine-tiny (2 denied)" in banner and "engine-moon" not in banner and "deaf" not in banner
    return said


def test_nothing_of_ours_comes_from_the_sources(house: House) -> None:
    code = "import engine, engine_tiny; print(engine.__file__, engine_tiny.__file__)"
    said = subprocess.run(
        [str(house.python), "-c", code],
        cwd=house.home,
        env=house.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(path.startswith(str(house.site)) for path in said.split()), said
    code_, listed = house.run("plugins", "--json")
    assert code_ == 0
    assert {row["distribution"] for row in json.loads(listed)["drivers"]} == {
        f"engine-{name}" for name in ("chat", "inspect", "parallel", "parsers", "reference", "server", "tiny")
    }


def test_it_is_selected_and_serves(house: House, without_it: str, moon: Path) -> None:
    code, said = house.run("plugins", "why", "scheduling_policy")
    assert code == 0 and re.search(r"moon +engine-moon +1\.0 +-50 +fits +'fcfs' has priority 0", said), said
    code, said = house.run("plugins", "doctor")
    assert code == 2 and "pip install engine-sdk" in said
    server = house.serve("tiny", "--verbose", "--scheduling-policy=moon", "--scheduling-policy.phase", "new")
    assert says(server) == without_it
    assert server.stop() == 0
    text = "".join(server.lines)
    assert "the moon of version 1.0 is new" in text and "the moon has seen a step" in text and "moon: asked" in text


@pytest.mark.slow
def test_it_is_upgraded_and_removed(house: House, moon: Path, tmp_path: Path) -> None:
    house.install(*house.build(write(tmp_path / "later", "2.0")))
    server = house.serve("tiny", "--scheduling-policy=moon")
    says(server)
    assert server.stop() == 0 and "the moon of version 2.0 is full" in "".join(server.lines)
    house.pip("uninstall", "--yes", "engine-moon")
    code, said = house.run("generate", "--scheduling-policy", "moon", "Once")
    assert code == 2 and "no installed distribution offers it; installed: fcfs" in said


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("card.py", "raise RuntimeError('the moon has set')", "the moon has set"),
        pytest.param("card.py", "class Moon(", "SyntaxError", marks=pytest.mark.slow),
        pytest.param(
            "card.py", "import a_library_that_nobody_has", "a_library_that_nobody_has", marks=pytest.mark.slow
        ),
        ("hooks.py", "raise RuntimeError('the moon is deaf')", "the moon is deaf"),
        pytest.param(
            "hooks.py",
            "from engine.plugin import hookimpl\n\n\n@hookimpl\ndef step_dome(stats): ...\n\n\nListener = 3",
            "",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_broken_and_unselected_it_harms_nobody(house: House, moon: Path, file: str, text: str, found: str) -> None:
    (moon / file).write_text(text)
    server = house.serve("tiny", "--verbose")
    assert says(server)
    assert server.metrics()["quarantined_drivers"] == bool(found)
    assert server.stop() == 0
    banner = "".join(server.lines)
    code, said = house.run("plugins")
    assert code == 0 and "engine-moon" in said and ("! broken (engine serve, " in said) == bool(found)
    if found:
        assert found in said and "engine-moon 1.0" in banner and found in banner
        code, doctor = house.run("plugins", "doctor")
        assert code == 1 and found in doctor and "engine-moon" in doctor


def test_it_is_denied(house: House, without_it: str, moon: Path) -> None:
    (moon / "hooks.py").write_text("raise RuntimeError('the moon is deaf')")
    code, said = house.run("generate", "--plugins=-engine-moon", "--scheduling-policy", "moon", "Once")
    assert code == 2 and "'-engine-moon' denies it" in said
    code, said = house.run("plugins", "--plugins=-engine-moon")
    assert code == 0 and said.count("denied; '-engine-moon' denies it") == 2


def test_broken_and_asked_for_it_stops_the_start(house: House, moon: Path) -> None:
    (moon / "card.py").write_text("import a_library_that_nobody_has")
    code, said = house.run("generate", "--scheduling-policy", "moon", "Once")
    assert code == 2 and "a_library_that_nobody_has" in said and "pip install a_library_that_nobody_has" in said


def test_an_option_that_it_does_not_have(house: House, moon: Path) -> None:
    code, said = house.run("generate", "--scheduling-policy", "moon", "--scheduling-policy.fase", "new", "Once")
    assert code == 2 and "phase" in said


def test_a_worker_with_another_version_stops_the_start(house: House, moon: Path) -> None:
    """The launcher sees version 1.0; the process that it starts finds another one installed."""
    script = (
        "from engine import EngineArgs\n"
        "from engine.frontend.launch import launch\n"
        "from engine_kit.process_client import start_process\n"
        "import pathlib, sys\n"
        f"info = pathlib.Path({str(house.site)!r}, 'engine_moon-1.0.dist-info')\n"
        "plan = launch(EngineArgs(model='tiny', scheduling_policy='moon'))\n"
        "text = (info / 'METADATA').read_text()\n"
        "(info / 'METADATA').write_text(text.replace('Version: 1.0', 'Version: 9.9'))\n"
        "try:\n"
        "    core = start_process(plan.start)\n"
        "    core.wait_ready()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
        "finally:\n"
        "    (info / 'METADATA').write_text(text)\n"
    )
    said = subprocess.run(
        [str(house.python), "-c", script], cwd=house.home, env=house.environment, capture_output=True, text=True,
        timeout=120, check=True,
    ).stdout  # fmt: skip
    assert (
        said.startswith("ManifestError")
        and "engine-moon 1.0 in the launcher" in said
        and "engine-moon 9.9 here" in said
    )
