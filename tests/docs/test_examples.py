"""The examples in the texts do what the texts say: each page's Python runs, each package written in a page works."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.installing import install, run
from tests.docs.markdown import ROOT, Block, blocks, files, name, pages
from tests.serving.conftest import Server

PAGES = [page for page in pages() if any(block.language == "python" for block in blocks(page))]
CLIENTS = ("openai", "127.0.0.1:8000")
DRIVER = ROOT / "docs" / "plugins" / "driver.md"
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
def test_the_pages_scripts_run(page, tmp_path):
    script = "\n".join(s for s in scripts(page) if not _is_client(s)).replace("/path/to/hf/folder", "tiny")
    done = run(["-c", script], tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    if "print(" in script:
        assert done.stdout.strip()


@pytest.fixture(scope="module")
def server() -> Server:
    running = Server("tiny")
    yield running
    assert running.stop() == 0, "".join(running.lines)


@pytest.mark.parametrize("page", [p for p in PAGES if any(_is_client(s) for s in scripts(p))], ids=name)
def test_the_pages_clients_run(page, server, tmp_path):
    script = "\n".join(s for s in scripts(page) if _is_client(s)).replace("http://127.0.0.1:8000", server.address)
    done = run(["-c", script], tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_driver_of_the_guide_passes_its_own_tests(tmp_path):
    found = files(DRIVER)
    assert len(found) == 5
    install({path: text for path, text in found.items() if not path.startswith("tests/")}, tmp_path / "installed")
    test = tmp_path / "test_shortest.py"
    test.write_text(found["tests/test_shortest.py"])
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(test)]
    done = run(arguments, tmp_path / "installed", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "43 passed" in done.stdout


def test_the_hook_of_the_guide_is_heard(tmp_path):
    install(files(HOOKS), tmp_path)
    arguments = ["-m", "engine", "generate", "Hello", "--max-tokens", "9", "--ignore-eos"]
    done = run(arguments, tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^4 steps, 1 running, \d+ pages of the KV cache$", done.stderr, re.MULTILINE), done.stderr
    listed = run(["-m", "engine", "plugins"], tmp_path, tmp_path)
    assert re.search(r"hooks\.core +stepcount +engine-stepcount +0\.1\.0", listed.stdout)


def test_the_guides_files_are_where_its_listing_says(tmp_path):
    listing = blocks(DRIVER)[0].text.split()
    assert listing[0] == "engine-shortest/"
    assert sorted(listing[1:]) == sorted(files(DRIVER))
