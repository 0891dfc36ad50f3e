"""The page's routes, asked without a browser."""

from __future__ import annotations

import json
import re
import threading
import time
from importlib.resources import files
from typing import Any

import httpx
import pytest

from engine_playground import Playground, PlaygroundOptions
from engine_playground.files import read_files

pytestmark = pytest.mark.xdist_group("playground")

STATIC = files("engine_playground").joinpath("static")


def look(served: Any) -> dict[str, Any]:
    answer = httpx.get(f"{served.address}/playground/live", headers={"x-api-key": served.key}, timeout=30)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text)


def test_the_page_and_its_files_need_no_key(served: Any) -> None:
    names = {file.name for file in read_files()}
    assert {"index.html", "app.js", "base.css", "icon.svg"} <= names
    for file in read_files():
        path = "/" if file.name == "index.html" else f"/playground/{file.name}"
        answer = httpx.get(served.address + path)
        assert (answer.status_code, answer.content) == (200, file.content)
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(served.address + path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert httpx.post(served.address + path).status_code == 401
    for path in ("/playground/nothing.js", "/playground/", "/playground/../pyproject.toml"):
        assert httpx.get(served.address + path).status_code == 401
        assert httpx.get(served.address + path, headers={"x-api-key": served.key}).status_code == 404


def test_the_files_name_nobody_else() -> None:
    known = {file.name for file in read_files()}
    for entry in STATIC.iterdir():
        text = entry.read_text()
        assert not re.search(r"https?:|//\w+\.\w+", re.sub(r"xmlns=\"[^\"]*\"", "", text)), entry.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), entry.name
        for name in re.findall(r"(?:from |playground/|\./)\"?\.?/?([\w-]+\.(?:js|css|svg))", text):
            assert name in known, f"{entry.name} names {name}"
    html = STATIC.joinpath("index.html").read_text()
    assert "<style" not in html and not re.search(r"\s(?:style|on\w+)=", html)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", html) == [""]
    labelled = set(re.findall(r"for=\"([\w-]+)\"", html))
    for tag in re.findall(r"<(?:input|select|textarea)[^>]*>", html):
        found = re.search(r"\bid=\"([\w-]+)\"", tag)
        assert found is not None and found[1] in labelled, f"no label: {tag}"


def test_live_needs_the_key_and_tells_of_the_engine(served: Any) -> None:
    refused = httpx.get(f"{served.address}/playground/live")
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    told = look(served)
    assert told["engine"]["model"] == "tiny" and told["engine"]["architecture"] == "LlamaForCausalLM"
    assert told["refresh"] == 0.2
    drivers = {driver["point"]: driver for driver in told["drivers"]}
    assert drivers["evictor"] == {
        "point": "evictor",
        "driver": "lru",
        "distribution": "engine-reference",
        "version": drivers["evictor"]["version"],
        "why": "auto, priority 0",
        "kinds": [],
    }
    [pages] = told["pages"]
    assert pages["total"] == sum(pages["counts"]) == 599


def test_live_follows_requests_that_share_their_beginning(served: Any) -> None:
    def ask() -> None:
        body = {
            "prompt": "Once upon a time there was a king. " * 12,
            "n": 3,
            "max_tokens": 1200,
            "ignore_eos": True,
            "min_tokens": 1200,
            "stream": True,
        }
        headers = {"x-api-key": served.key}
        with httpx.stream("POST", f"{served.address}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            assert answer.status_code == 200
            for _ in answer.iter_lines():
                if done.is_set():
                    return

    done = threading.Event()
    before = look(served)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        deadline = time.monotonic() + 30
        while True:
            told = look(served)
            [pages] = told["pages"]
            if pages["counts"][4] and told["stats"]["num_running"] == 3:  # three hold the pages of one prompt
                break
            assert time.monotonic() < deadline, told
        assert pages["saved"] >= 2 * pages["counts"][4] and "4" in pages["cells"]
        assert told["time"] > before["time"]
    finally:
        done.set()
        asking.join()
    deadline = time.monotonic() + 30
    while (told := look(served))["stats"]["num_running"] or sum(told["pages"][0]["counts"][2:]):
        assert time.monotonic() < deadline, told
    assert told["pages"][0]["counts"][1] > 0, "the prompt stays cached"
    assert told["stats"]["generation_tokens"] > (before["stats"] or {"generation_tokens": 0})["generation_tokens"]


def test_switched_off_it_is_silent() -> None:
    silent = Playground(PlaygroundOptions(enabled=False))
    assert silent.http_routes is None and silent.engine_started is None
    assert PlaygroundOptions().enabled
