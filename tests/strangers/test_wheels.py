"""Every wheel is built, offline; `engine` serves the bundled model, and the core with its reference drivers runs `LLM`
where there is no library of a server."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import httpx
import pytest

from .house import REFERENCE, ROOT, House

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheels")]

LIBRARIES = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "orjson", "prometheus_client")
"""What a server needs, and nothing else of ours may."""


def wanted_by_engine() -> list[str]:
    """The packages that the distribution `engine` names, with itself, as folders."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    folders = {
        tomllib.loads(file.read_text())["project"]["name"]: str(file.parent.relative_to(ROOT))
        for pattern in ("core", "plugins/*", "sdk/*", "contrib/*")
        for file in ROOT.glob(f"{pattern}/pyproject.toml")
    }
    return [".", *(folders[name.partition("==")[0]] for name in named)]


def test_every_wheel_can_be_built(tmp_path: Path) -> None:
    """Those that `engine` does not name; the others are built below."""
    named = {*wanted_by_engine()}
    others = [
        str(file.parent.relative_to(ROOT))
        for pattern in ("plugins/*", "sdk/*", "contrib/*")
        for file in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
        if str(file.parent.relative_to(ROOT)) not in named
    ]
    assert len(others) > 5
    House(tmp_path, others)


def test_engine_serves_the_bundled_model(tmp_path: Path) -> None:
    house = House(tmp_path, wanted_by_engine())
    server = house.serve()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = httpx.post(server.address + "/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"]
    assert server.stop() == 0
    code, listed = house.run("plugins", "--json")
    assert code == 0 and {row["point"] for row in json.loads(listed)["drivers"]} > {"attention", "grammar", "router"}


def test_the_core_runs_where_no_server_could(tmp_path: Path) -> None:
    house = House(tmp_path, REFERENCE, without=LIBRARIES)
    code = (
        "import importlib.util as found\n"
        f"assert not any(found.find_spec(name) for name in {LIBRARIES!r})\n"
        "from engine import LLM, SamplingParams\n"
        "with LLM(model='tiny') as llm:\n"
        "    print(repr(llm.generate('Once', SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].text))\n"
    )
    said = subprocess.run(
        [str(house.python), "-c", code], cwd=house.home, env=house.environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert said.returncode == 0 and len(said.stdout.strip()) > 2, said.stderr
    code_, said_ = house.run("serve")
    assert code_ == 2 and "engine serve" in said_
    code_, said_ = house.run("plugins")
    assert code_ == 2 and "pip install engine-inspect" in said_
