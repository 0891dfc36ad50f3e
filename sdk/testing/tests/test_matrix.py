"""The driver-by-capability matrix says what test results say, and nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest

import engine_sdk.conformance as kit
from engine_sdk.conformance.capabilities import CAPABILITIES, FORM, row_of
from engine_sdk.conformance.matrix import (
    NO,
    NOT_RUN,
    PART,
    UNTESTED,
    YES,
    Cell,
    build,
    keep,
    read,
    render,
    tables_of,
    verdict,
)
from engine_sdk.conformance.report import DriverUnderTest, Report, Result, as_json, from_json, run_driver, run_file

PASSED = Result("TestMine", "test_decode[float32]", "passed")
REFUSED = Result("TestMine", "test_sinks[None]", "skipped", "sinks are not served", not_served=True)
MISSING = Result("TestMine", "test_captured_step", "skipped", "the platform of cpu captures no steps")
FAILED = Result("TestMine", "test_soft_cap[0.5]", "failed", "AssertionError: 3 of 8 elements are wrong")
FAILS = "fails `test_soft_cap[0.5]`: AssertionError: 3 of 8 elements are wrong"


@pytest.mark.parametrize(
    ("results", "word", "notes"),
    [
        ([PASSED, PASSED], YES, ()),
        ([PASSED, REFUSED], PART, ("sinks are not served",)),
        ([PASSED, MISSING], PART, ("untested: the platform of cpu captures no steps",)),
        ([REFUSED, REFUSED], NO, ("sinks are not served",)),
        ([REFUSED, MISSING], UNTESTED, ("the platform of cpu captures no steps",)),
        ([MISSING], UNTESTED, ("the platform of cpu captures no steps",)),
        ([FAILED], NO, (FAILS,)),
        ([PASSED, REFUSED, MISSING, FAILED], NO, (FAILS,)),
    ],
)  # fmt: skip
def test_verdicts(results: list[Result], word: str, notes: tuple[str, ...]) -> None:
    assert verdict(results) == (word, notes)


def report_of(*results: Result, **options: object) -> Report:
    return Report(list(results), {"TestMine": DriverUnderTest("attention", "mine", options, "cpu")})


def test_a_page_can_be_read_again() -> None:
    reports = [report_of(PASSED, REFUSED, MISSING, FAILED), report_of(PASSED, level="wide")]
    tables = build(reports, {"attention": ["mine", "other"], "router": ["chance"]})
    assert tables["attention"].columns == ["mine", "mine, level wide", "other"]
    assert tables["attention"].failures() == [f"mine: {FAILS}"]
    text = render(tables, "# Page\n\nWords.\n")
    assert "Untested: `chance`." in text
    said = read(text)
    decode = "decode, prefill and both in one batch, float32"
    assert said["router"] == {}
    assert [said["attention"][decode, c] for c in tables["attention"].columns] == [YES, YES, UNTESTED]
    assert [said["attention"][row, "mine"] for row in ("attention sinks", "logits soft cap")] == [NO, NO]
    assert said["attention"]["captured and replayed decode steps", "mine"] == UNTESTED
    assert said["attention"]["logits soft cap", "mine, level wide"] == UNTESTED
    assert NOT_RUN in text and "sinks are not served" in text


def test_what_cannot_be_tested_here_stays_as_the_page_had_it() -> None:
    """And says so; what was tested again does not. The page has all that it was made of."""
    names = {"attention": ["mine", "other"]}
    noted = Result("TestMine", "test_sinks[None]", "skipped", "no_sinks *here* <yet> [1]", not_served=True)
    page = render(build([report_of(PASSED, noted), report_of(PASSED, noted, level="wide")], names), "")
    before = tables_of("\n" + page)["attention"]
    assert render({"attention": before}, "") == page
    before.cells["as it was called once", "mine"] = Cell(YES)
    card = Result("TestMine", "test_card_is_light", "passed")
    decode, sinks = (("decode, prefill and both in one batch, float32", "mine"), ("attention sinks", "mine"))
    for now, columns in ((report_of(card, MISSING), 1), (Report(), 2), (report_of(PASSED), 1)):
        table = build([now], names)["attention"]
        keep("attention", table, before, "kept")
        assert table.columns == [*before.columns[:columns], "other"]
        assert "as it was called once" not in table.rows("attention")
        if now.of("passed") == [PASSED]:
            assert table.cells == {decode: Cell(YES)}
        else:
            assert table.cells[decode] == (YES, ("kept",))
            assert table.cells[sinks] == (NO, ("no_sinks *here* <yet> [1]", "kept"))


def test_a_device_that_others_stand_in_for_is_named() -> None:
    """What was run in its place is not passed off as the device."""
    tested = {
        "TestMine": DriverUnderTest("attention", "mine", {"bits": 8}, "cpu", "interpreted"),
        "TestReal": DriverUnderTest("attention", "mine", {}, "cuda"),
    }
    again = from_json(as_json(Report([PASSED, Result("TestReal", "test_decode[float32]", "passed")], tested)))
    assert build([again], {"attention": ["mine"]})["attention"].columns == [
        "mine, bits 8, interpreted",
        "mine, on cuda",
    ]


def test_what_is_unfit_for_this_machine_is_untested() -> None:
    """A card that refuses everything here may be right, and the driver's work is unknown."""
    card = Result("TestMine", "test_card_is_light", "passed")
    tables = build([report_of(card, REFUSED)], {"attention": ["mine"]})
    words = {row: cell.word for (row, _), cell in tables["attention"].cells.items()}
    assert words == {"attention sinks": UNTESTED, FORM.name: YES}


def test_of_a_real_suite() -> None:
    """Who was tested, and which skips are the driver's own words; also after the way through JSON."""
    report = run_driver("scheduling_policy", "fcfs", {}, select="urgent or arrival")
    assert report.tested == {"TestDriver": DriverUnderTest("scheduling_policy", "fcfs", {}, "cpu")}
    words = {
        row: c for (row, _), c in build([report], {"scheduling_policy": ["fcfs"]})["scheduling_policy"].cells.items()
    }
    assert words["order of arrival among equals"].word == YES
    assert words["priorities"] == (NO, ("the card's orders_by_priority is False",))
    again = from_json(as_json(report))
    assert again.results == report.results and again.tested == report.tested


def test_a_lack_of_the_test_is_no_word_of_the_driver(tmp_path: Path) -> None:
    path = tmp_path / "test_lacking.py"
    path.write_text(
        "import pytest\nfrom engine_sdk.conformance import Conformance\n\n"
        "class TestLacking(Conformance):\n"
        "    point, protocol, driver = 'evictor', 'Evictor', 'lru'\n"
        "    test_card_is_light = test_card_is_sound = test_card_answers_in_sentences = None\n"
        "    def test_hardware(self):\n        pytest.skip('there is no such device')\n"
    )
    results = {r.test: r for r in run_file(path).results}
    assert (results["test_hardware"].outcome, results["test_hardware"].not_served) == ("skipped", False)


def test_where_something_lies_is_no_option_of_a_column(tmp_path: Path) -> None:
    """A folder, say, is another one in each run."""
    path = tmp_path / "test_placed.py"
    path.write_text(
        "from engine_sdk.conformance import DrafterConformance\n\n"
        "class TestPlaced(DrafterConformance):\n"
        "    driver, places = 'ngram', {'min_match'}\n"
        "    options = {'min_match': 3, 'num_tokens': 5}\n"
    )
    report = run_file(path, only=["TestPlaced::test_card_is_sound"])
    assert report.tested["TestPlaced"].options == {"num_tokens": 5}


def functions_of(point: str) -> set[str]:
    """The names of a suite's tests, and of its long ranges."""
    classes = [getattr(kit, name) for name in (*kit.SUITES[point], *kit.VARIANTS.get(point, ()))]
    return {name for cls in classes for name in dir(cls) if name.startswith("test_") and name != "test_figure"}


@pytest.mark.parametrize("point", CAPABILITIES)
def test_every_test_of_a_suite_proves_a_capability(point: str) -> None:
    """And every capability that is declared has tests; those of one name, given different things, share it."""
    named = {f"test_{word}" for capability in (*CAPABILITIES[point], FORM) for word in capability.tests.split()}
    own = {f"test_{word}" for capability in CAPABILITIES[point] for word in capability.tests.split()}
    tests = functions_of(point)
    left_out = tests - named - {"test_thorough_forms", "test_thorough_ragged_batches"}
    assert not left_out, f"tests that stand in no row of {point}"
    assert own <= tests, f"rows of {point} with tests that are not there: {own - tests}"


def test_a_suite_without_rows_has_one_for_each_test() -> None:
    assert row_of("no_such_point", "test_keeps_its_word[3]") == "keeps its word"
    assert row_of("attention", "test_figure") is None
