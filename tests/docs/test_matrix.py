"""The driver-by-capability matrix has every driver and capability of the code, and is what the suites say."""

from __future__ import annotations

import sys

import pytest

from engine_sdk.conformance import SUITES
from engine_sdk.conformance.capabilities import CAPABILITIES, FORM
from engine_sdk.conformance.matrix import NO, PART, UNTESTED, YES, read
from tests.docs.markdown import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import generate_drafters
import generate_matrix
import generate_models
from generate_matrix import OTHERS

SAID = read(generate_matrix.PAGE.read_text(encoding="utf-8"))


def drivers(point: str) -> set[str]:
    """The drivers that the page names, whatever options they have there."""
    text = generate_matrix.PAGE.read_text(encoding="utf-8").split(f"\n## {point}\n")[1].split("\n## ")[0]
    if not SAID[point]:
        return {name.strip("`., ") for name in text.split("Untested:")[1].split(". ")[0].split(",")}
    return {column.partition(",")[0] for _, column in SAID[point]}


def test_the_points() -> None:
    assert list(SAID) == OTHERS
    assert {point for point in SAID if SAID[point]} == set(SUITES) - {generate_models.POINT}


@pytest.mark.parametrize("point", OTHERS)
def test_the_drivers(point: str) -> None:
    """Those that the packages register: `python docs/generate_matrix.py` writes the page again."""
    assert drivers(point) == set(generate_matrix.drivers()[point])


@pytest.mark.parametrize("point", [point for point in CAPABILITIES if point in OTHERS])
def test_the_capabilities(point: str) -> None:
    rows = {row for row, _ in SAID[point]}
    known = (*CAPABILITIES[point], FORM)
    unknown = {row for row in rows if not any(capability.names(row) for capability in known)}
    assert not unknown, "rows that the code does not declare"
    long = {c.name for c in known if all(test.startswith("thorough") for test in c.tests.split())}
    missing = {c.name for c in known if c.name not in long and not any(c.names(row) for row in rows)}
    assert not missing, "capabilities that the page does not have"


def test_the_words() -> None:
    words = {word for cells in SAID.values() for word in cells.values()}
    assert words <= {YES, PART, NO, UNTESTED}
    assert "fails `test_" not in generate_matrix.PAGE.read_text(encoding="utf-8"), "a driver of ours fails its suite"


def test_every_suite_of_ours_is_found() -> None:
    """Every point with a suite and a driver has one run against it, from some package's tests."""
    text = "".join(path.read_text(encoding="utf-8") for path in generate_matrix.suite_files())
    assert not [point for point, (suite, *_) in SUITES.items() if f"({suite})" not in text]
    assert ROOT / "plugins/models/tests/test_conformance.py" in generate_matrix.suite_files([generate_models.POINT])


def test_what_drafters_go_with() -> None:
    """The page is what the launcher says, of every drafter: `python docs/generate_drafters.py` writes it again."""
    assert generate_drafters.PAGE.read_text(encoding="utf-8") == generate_drafters.page()
    assert {one.driver for one in generate_drafters.DRAFTERS.values()} == set(generate_matrix.drivers()["drafter"])


def test_the_page_of_models() -> None:
    """It has every model that the packages register, in words that it explains, and none that fails:
    `python docs/generate_models.py` writes it again."""
    text = generate_models.PAGE.read_text(encoding="utf-8")
    said = generate_models.read(text)
    assert text.startswith(generate_models.HEAD)
    assert said.keys() == set(generate_matrix.drivers()[generate_models.POINT])
    assert {word for words in said.values() for word in words} <= {YES, PART, NO, UNTESTED}
    assert "fails `test_" not in text, "a model of ours fails its suite"
    apart = {name for name, words in said.items() if set(words) == {UNTESTED}}
    assert apart == set(generate_models.DRAFTING) and all(
        (ROOT / path).exists() for path in generate_models.DRAFTING.values()
    )


@pytest.mark.slow
def test_the_page_of_models_is_what_the_suites_say() -> None:
    """On this machine; whatever is untested here may be tested there."""
    said = generate_models.read(generate_models.PAGE.read_text(encoding="utf-8"))
    found = generate_models.read(generate_models.render(generate_matrix.tables(2, [generate_models.POINT])["model"]))
    assert found == said


@pytest.mark.slow
def test_the_page_is_what_the_suites_say() -> None:
    """On this machine: what it lacks may be untested here and tested there, and the other way round."""
    found = read("\n" + generate_matrix.render(generate_matrix.tables(2), ""))
    assert {p: {c for _, c in cells} for p, cells in found.items()} == {p: {c for _, c in s} for p, s in SAID.items()}
    differing = {
        (point, row, column): (SAID[point].get((row, column)), word)
        for point, cells in found.items()
        for (row, column), word in cells.items()
        if SAID[point].get((row, column)) != word and UNTESTED not in (SAID[point].get((row, column)), word)
    }
    assert not differing
