"""The examples in the texts do what the texts say: each page's Python runs, each package written in a page works."""

from __future__ import annotations

import ast
import json
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.main import main
from engine_sdk.conformance.report import run_file
from tests.docs.installing import install, put_on_path
from tests.docs.markdown import ROOT, Block, blocks, files, name, pages
from tests.serving.conftest import Server

PAGES = [page for page in pages() if any(block.language == "python" for block in blocks(page))]
CLIENTS = ("openai", "127.0.0.1:8000")
DRIVER = ROOT / "docs" / "plugins" / "driver.md"
DRAFTER = ROOT / "docs" / "plugins" / "drafter.md"
EVICTOR = ROOT / "docs" / "plugins" / "tutorial-evictor.md"
STORE = ROOT / "docs" / "plugins" / "tutorial-store.md"
MODEL = ROOT / "docs" / "plugins" / "tutorial-model.md"
EXPERTS = ROOT / "docs" / "plugins" / "tutorial-experts.md"
NODES = ROOT / "docs" / "plugins" / "tutorial-nodes.md"
HOOKS = ROOT / "docs" / "plugins" / "hooks.md"


def scripts(page: Path) -> list[str]:
    """The Python blocks of a page that are no files, in order: they may build on each other."""
    return [b.text for b in blocks(page) if b.language == "python" and not _is_file(b)]


def _is_file(block: Block) -> bool:
    return bool(re.match(r"# [\w./-]+\.py\n", block.text))


def _is_client(script: str) -> bool:
    return any(word in script for word in CLIENTS)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_pages_python_is_valid(page):
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)


@pytest.mark.parametrize("page", [p for p in PAGES if any(not _is_client(s) for s in scripts(p))], ids=name)
def test_the_pages_scripts_run(page, tmp_path, monkeypatch, capsys):
    """In this process, which has torch imported: a script of its own takes seconds to come so far."""
    text = "\n".join(s for s in scripts(page) if not _is_client(s)).replace("/path/to/hf/folder", "tiny")
    script = tmp_path / "script.py"
    script.write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    if "print(" in text:
        assert capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def server() -> Server:
    running = Server("tiny")
    yield running
    assert running.stop() == 0, "".join(running.lines)


@pytest.mark.parametrize("page", [p for p in PAGES if any(_is_client(s) for s in scripts(p))], ids=name)
def test_the_pages_clients_run(page, server, tmp_path, monkeypatch, capsys):
    """In this process too: the clients' libraries take as long."""
    script = tmp_path / "script.py"
    text = "\n".join(s for s in scripts(page) if _is_client(s))
    script.write_text(text.replace("http://127.0.0.1:8000", server.address))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()


def own_tests(page: Path, test: str, folder: Path, patch: pytest.MonkeyPatch, select: str = "") -> int:
    """How many tests of the package that is written in a page pass: all."""
    patch.setenv("TMPDIR", str(folder))  # a module's temporary folder lives until it is collected
    patch.setattr(tempfile, "tempdir", None)
    found = files(page)
    install({path: text for path, text in found.items() if not path.startswith("tests/")}, folder / "installed")
    put_on_path(patch, folder / "installed")
    (folder / test).write_text(found[f"tests/{test}"])
    report = run_file(folder / test, select=select)
    assert not report.of("failed"), report.output
    return len(report.of("passed"))


def test_the_driver_of_the_guide_passes_its_own_tests(tmp_path, monkeypatch):
    assert own_tests(DRIVER, "test_shortest.py", tmp_path, monkeypatch) == 43


def test_the_drafter_of_the_guide_changes_no_output(tmp_path, monkeypatch):
    assert own_tests(DRAFTER, "test_recall.py", tmp_path, monkeypatch, "not TestRecall") == 2


@pytest.mark.slow
def test_the_evictor_of_the_tutorial_passes_the_suite_and_outlives_a_scan(tmp_path, monkeypatch):
    assert own_tests(EVICTOR, "test_two_queues.py", tmp_path, monkeypatch) == 20


def test_the_store_of_the_tutorial_passes_the_suite_and_survives_restarts(tmp_path, monkeypatch):
    assert own_tests(STORE, "test_sqlite.py", tmp_path, monkeypatch) == 14


def test_the_machines_of_the_tutorial_run_an_engine(tmp_path, monkeypatch):
    assert own_tests(NODES, "test_ssh.py", tmp_path, monkeypatch, "two_machines or exit_codes or runs_on") == 4


@pytest.mark.slow
def test_the_machines_of_the_tutorial_pass_the_suite(tmp_path, monkeypatch):
    assert own_tests(NODES, "test_ssh.py", tmp_path, monkeypatch) == 16


MODELS = pytest.mark.parametrize(
    "page, test", [(MODEL, "test_my_gemma.py"), (EXPERTS, "test_my_mixtral.py")], ids=["gemma", "mixtral"]
)


@MODELS
def test_the_models_of_the_tutorials_have_transformers_tokens(page, test, tmp_path, monkeypatch):
    assert own_tests(page, test, tmp_path, monkeypatch, "tokens_are or computes_it") == 4


@pytest.mark.slow
@MODELS
def test_the_models_of_the_tutorials_pass_the_suite(page, test, tmp_path, monkeypatch):
    assert own_tests(page, test, tmp_path, monkeypatch) == 51


@pytest.mark.slow
def test_the_drafter_of_the_guide_passes_the_suite(tmp_path, monkeypatch):
    assert own_tests(DRAFTER, "test_recall.py", tmp_path, monkeypatch) == 20


def test_the_hook_of_the_guide_is_heard(tmp_path, monkeypatch, capsys):
    install(files(HOOKS), tmp_path)
    put_on_path(monkeypatch, tmp_path)
    assert main(["generate", "Hello", "--max-tokens", "9", "--ignore-eos"]) == 0
    told = capsys.readouterr().err
    assert re.search(r"^4 steps, 1 running, \d+ pages of the KV cache$", told, re.MULTILINE), told
    assert main(["plugins"]) == 0
    assert re.search(r"hooks\.core +stepcount +engine-house +0\.1\.0", capsys.readouterr().out)


def test_the_guides_limit_filter_route_and_metric(tmp_path, monkeypatch):
    install(files(HOOKS), tmp_path)
    put_on_path(monkeypatch, tmp_path)
    flags = ["--hooks.rate-limit.most", "3", "--hooks.redact.word", "Oslo"]
    server = Server("tiny", *flags)
    try:
        ask = {"prompt": "One day", "max_tokens": 24, "temperature": 0, "ignore_eos": True}

        def post(**more):
            return httpx.post(server.address + "/v1/completions", json={**ask, **more}, timeout=60)

        text = post().json()["choices"][0]["text"]
        assert "***" in text and "Oslo" not in text
        refused = post(logprobs=1)
        assert refused.status_code == 400 and "they would show what is hidden" in refused.json()["error"]["message"]
        streamed = "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in post(stream=True).text.splitlines()
            if line.startswith("data: {")
        )
        assert streamed == text
        limited = [post() for _ in range(3)][-1]
        assert limited.status_code == 429 and 1 <= int(limited.headers["retry-after"]) <= 60
        assert "the limit is 3" in limited.json()["error"]["message"]
        usage = httpx.get(server.address + "/house/usage").json()
        assert usage["output"] >= 48 and usage["output"] % 24 == 0
        assert server.metrics()["house_output_tokens_total{reason=length}"] == usage["output"]
    finally:
        assert server.stop() == 0, "".join(server.lines)


@given(text=st.text("ab", max_size=12), word=st.text("ab", min_size=1, max_size=4), cuts=st.sets(st.integers(0, 12)))
def test_the_guides_redactor_at_every_cut(text, word, cuts):
    space: dict[str, Any] = {}
    exec(files(HOOKS)["engine_house/redact.py"], space)
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    redactor = space["Redactor"](word)
    shown = [redactor(piece, False) for piece in pieces[:-1] if piece] + [redactor(pieces[-1], True)]
    assert "".join(shown) == text.replace(word, "***")


@pytest.mark.parametrize(
    "page, package",
    [
        (DRIVER, "shortest"),
        (DRAFTER, "recall"),
        (EVICTOR, "two-queues"),
        (STORE, "sqlite"),
        (MODEL, "my-gemma"),
        (EXPERTS, "my-mixtral"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_guides_files_are_where_its_listing_says(page, package):
    listing = blocks(page)[0].text.split()
    assert listing[0] == f"engine-{package}/"
    assert sorted(listing[1:]) == sorted(files(page))
