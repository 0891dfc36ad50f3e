"""Every mutant is caught by its suite, and the documentation says by which test."""

from __future__ import annotations

import mutants
import pytest

from engine_sdk.conformance import SUITES
from engine_sdk.conformance.report import run_file

SOME = ("evictor", "logits_processor", "router", "scheduling_policy")
"""Points whose mutants are tried each time; the others' take longer, and are tried with the slow tests."""
each_point = pytest.mark.parametrize("point", mutants.points())


def test_every_suite_has_mutants():
    assert mutants.points() == list(SUITES)


@each_point
def test_the_page_names_every_mutant(point):
    """`python sdk/testing/tests/mutants.py` writes it."""
    assert {name: fault for name, (fault, _) in mutants.page()[point].items()} == mutants.faults(point)


@pytest.mark.parametrize(
    "point", [point if point in SOME else pytest.param(point, marks=pytest.mark.slow) for point in mutants.points()]
)
def test_each_mutant_is_caught_by_the_test_that_the_page_names(point):
    named = [f"Test{name}::{test}" for name, (_, test) in mutants.page()[point].items()]
    report = run_file(mutants.path_of(point), only=named)
    assert len(report.results) == len(named), report.output
    survivors = [f"{result.suite}: {result.test}" for result in report.results if result.outcome != "failed"]
    assert not survivors


@pytest.mark.slow
@each_point
def test_the_page_is_what_the_suites_say(point):
    """The whole suites: what is caught first, by whom; and what is not broken is not caught."""
    found = mutants.caught(point)
    assert found == {name: test for name, (_, test) in mutants.page()[point].items()}
