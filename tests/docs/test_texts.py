"""What the texts name is there: paths, links, commands, flags, variables, targets, errors, routes."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from engine.config.sources import CONFIG_VARIABLE, name_of, resolve
from engine.plugin import HookRelay, Registry
from engine.types import errors
from engine_server.keys import KeyRing
from engine_server.plugins import ServerView, add_routes
from tests.docs import commands
from tests.docs.markdown import ROOT, blocks, links, name, pages, running_text, spans, table_faults

PAGES = pages()
IDS = [name(page) for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=IDS)

PLACES = (ROOT, ROOT / "core" / "src" / "engine", *ROOT.glob("plugins/*/src"), *ROOT.glob("sdk/*/src"))
"""Where a path may begin: the repository, the core's package, or beside another's."""
MADE = ("site/", "docs/reference/", ".venv")
"""What commands make."""
A_MODELS_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_PATH = re.compile(r"\.?[\w-][\w.-]*(/[\w.*-]+)*/?\Z")
_SUFFIXES = (".py", ".md", ".toml", ".txt", ".jinja", ".yaml", ".json", ".safetensors")


def is_path(span: str) -> bool:
    """Whether a code span names a file or folder of the repository (absolute ones are the reader's own)."""
    if not _PATH.match(span) or span.startswith(("http", "engine-shortest/")) or span in A_MODELS_FILES:
        return False
    return span.endswith((*_SUFFIXES, "/")) or ("/" in span and not span.replace("/", "").isdigit())


@functools.cache
def metrics_page() -> str:
    """The generated page on metrics, made by the script itself."""
    code = "import generate_reference as g; print(g.metrics_page())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "docs", capture_output=True, text=True, check=True)
    return done.stdout


@functools.cache
def names() -> frozenset[str]:
    """The name of every file and folder of the packages, the tests and the documentation, and of the root's own."""
    below = (
        path.name
        for folder in ("core", "plugins", "contrib", "sdk", "tests", "docs")
        for path in (ROOT / folder).rglob("*")
    )
    return frozenset([*below, *(path.name for path in ROOT.iterdir())])


def exists(path: str, page: Path) -> bool:
    """Whether it is there, is made by a command, or is one of the files that the page itself writes."""
    own = re.findall(r"^# ([\w./-]+\.\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if path.startswith(MADE) or any(file == path or file.endswith("/" + path) for file in own):
        return True
    if "/" not in path.rstrip("/"):  # a name alone: of a file or folder somewhere in the repository
        return path.rstrip("/") in names()
    return any((place / path).exists() for place in PLACES)


def test_there_are_texts():
    assert len(PAGES) > 15
    assert sum(len(commands.command_lines(page)) for page in PAGES) > 30
    assert sum(is_path(span) for page in PAGES for span in spans(page)) > 100


@each_page
def test_paths_exist(page):
    missing = [span for span in spans(page) if is_path(span) and not exists(span, page)]
    assert missing == []


@each_page
def test_links_lead_somewhere(page):
    for link in links(page):
        target, _, _ = link.partition("#")
        if target.startswith(("http://", "https://")) or not target:
            continue
        path = (page.parent / target).resolve()
        generated = ROOT / "docs" / "reference"
        assert path.exists() or generated in path.parents, f"{link} leads nowhere"


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*/*/README.md"))], ids=name)
def test_tables_are_whole(page):
    assert table_faults(running_text(page)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("| a | b |\n|---|:-:|\n| 1 | `x\\|y` |", None),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\nbetween\n\n| 3 | 4 |", "no head above: | 3 | 4 |"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\nbetween\n| 3 | 4 |\n| 5 | 6 |", "no head above: | 3 | 4 |"),
        ("| a | b |\n|---|---|\n| 1 | `x|y` |", "not as wide as its head: | 1 | `x|y` |"),
    ],
)
def test_what_is_wrong_with_a_table_is_found(text, fault):
    assert table_faults(text) == ([] if fault is None else [fault])


@each_page
def test_command_lines_parse(page):
    for line in commands.command_lines(page):
        commands.parse(line)


@each_page
def test_flags_exist(page):
    known = commands.flags()
    for span in spans(page):
        if re.match(r"--[a-z]", span):
            flag = re.split(r"[ =]", span)[0]
            if "." in flag:
                assert resolve(flag.removeprefix("--")).section == "options"
            else:
                assert flag.replace("_", "-") in known, f"there is no flag {flag}"


@each_page
def test_environment_variables_set_something(page):
    text = page.read_text(encoding="utf-8")
    for variable in set(re.findall(r"\bENGINE_[A-Z0-9_]+\b", text)) - {CONFIG_VARIABLE}:
        resolve(name_of(variable))


@each_page
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shell = "\n".join(block.text for block in blocks(page) if block.language in ("sh", ""))
    named = {span.split()[1] for span in spans(page) if re.match(r"make [a-z]", span)}
    named |= set(re.findall(r"^make ([a-z][\w-]*)", shell, re.MULTILINE))
    assert named <= targets


@each_page
def test_errors_exist(page):
    named = set(re.findall(r"\b[A-Z]\w+Error\b", page.read_text(encoding="utf-8")))
    builtin = {"ValueError", "IndexError", "KeyError", "TypeError", "AssertionError", "RuntimeError", "OSError"}
    assert {kind for kind in named - builtin if not hasattr(errors, kind)} == set()


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """The names of all metrics."""
    return set(re.findall(r"`(engine:\w+)`", metrics_page()))


@pytest.fixture(scope="module")
def served() -> set[str]:
    """The paths of all routes."""
    app = FastAPI()
    hooks = HookRelay("frontend", Registry.discover())
    idle: Any = SimpleNamespace(hooks=hooks, max_model_len=64, model_name="tiny", observe=lambda measures: None)
    add_routes(app, hooks, ServerView(idle, Counter(), KeyRing()))
    return {route.path for route in app.routes}


@each_page
def test_metrics_and_routes_exist(page, exposed, served):
    text = page.read_text(encoding="utf-8")
    assert len(exposed) > 20
    assert set(re.findall(r"`(engine:\w+)`", text)) <= exposed
    named = {match[1].split("{")[0] for match in re.finditer(r"`(?:GET|POST) (/[\w/{}]+)`", text)}
    assert {path for path in named if not any(route.startswith(path) for route in served)} == set()
