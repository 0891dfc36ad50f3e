"""Discovery: metadata alone, first distribution wins, and every way in which an installation can be wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from engine.plugin.candidate import Candidate
from engine.plugin.discovery import Registry
from engine.plugin.plugin_list import own
from engine.plugin.points import EVICTOR, POINTS
from engine.types.errors import (
    ContractError,
    DriverImportError,
    DriverNotFoundError,
    DuplicateDriverError,
    IncompatibleDriverError,
)

CARD = """
    from engine.interfaces.evictor import EvictorCard

    class Mine(EvictorCard):
        pass
"""


def names(registry: Registry, point: str) -> list[str]:
    return [c.name for c in registry.candidates(point)]


def test_finds_installed_drivers_with_their_origin_and_imports_nothing(playground):
    playground.module("pg_found", CARD)
    playground.distribution("pg-found", "3.2", {"engine.evictor.v0": {"mine": "pg_found:Mine"}})
    registry = Registry.discover()
    expected = Candidate("evictor", "mine", 0, "pg-found", "3.2", "pg_found:Mine")
    assert registry.find("evictor", "mine") == expected
    assert playground.imported() == set()


def test_each_point_has_a_driver_of_ours_that_comes_through_entry_points():
    registry = Registry.discover()
    for point in POINTS:
        # a mixture's experts come with the models that have them, which a start of the tiny one does without
        ours = own() | {"experts": {"engine-moe"}, "adapter": {"engine-lora"}}.get(point, set())
        assert any(c.distribution in ours for c in registry.candidates(point)), point
    assert not [problem for problem in registry.problems if problem.kind == "broken"]


def test_discovery_imports_nothing_heavy():
    code = (
        "import sys; from engine.plugin import Registry, POINTS; r = Registry.discover();"
        "[r.candidates(p) for p in POINTS];"
        "heavy = {'torch', 'numpy', 'pydantic', 'stevedore', 'msgspec', 'pluggy', 'yaml'} & set(sys.modules);"
        "builtin = [m for m in sys.modules if m.startswith('engine_reference')];"
        "print(sorted(heavy) + builtin)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_first_distribution_of_a_name_wins(playground, monkeypatch):
    older = playground.folder / "later_on_the_path"
    playground.distribution("pg-Same", "2.0", {"engine.evictor.v0": {"first": "a:B"}})
    playground.distribution("pg_same", "1.0", {"engine.evictor.v0": {"second": "a:B"}}, folder=older)
    monkeypatch.setattr(sys, "path", [*sys.path, str(older)])
    found = names(Registry.discover(), "evictor")
    assert "first" in found and "second" not in found


def test_a_distribution_without_our_groups_hides_a_later_one_of_its_name(playground, monkeypatch):
    older = playground.folder / "later_on_the_path"
    playground.distribution("pg-same", "2.0", {"console_scripts": {"x": "a:b"}})
    playground.distribution("pg-same", "1.0", {"engine.evictor.v0": {"hidden": "a:B"}}, folder=older)
    monkeypatch.setattr(sys, "path", [*sys.path, str(older)])
    assert "hidden" not in names(Registry.discover(), "evictor")


def test_broken_metadata_is_a_problem_of_its_distribution_alone(playground):
    playground.distribution("pg-broken", "1.0", "[engine.evictor.v0]\nthis line has no equals sign\n")
    playground.distribution("pg-good", "1.0", {"engine.evictor.v0": {"good": "a:B"}})
    registry = Registry.discover()
    assert "good" in names(registry, "evictor")
    [problem] = (problem for problem in registry.problems if problem.kind == "broken")
    assert "broken" in problem.distribution
    assert "cannot be read" in problem.found


def test_unknown_point_is_a_problem_with_a_near_match(playground):
    playground.distribution("pg-typo", "1.0", {"engine.atention.v0": {"x": "a:B"}})
    [problem] = (problem for problem in Registry.discover().problems if problem.kind == "broken")
    assert problem.distribution == "pg-typo 1.0"
    assert "engine.atention.v0" in problem.found
    assert "attention" in problem.remedy


# -- majors ----------------------------------------------------------------------------------------------------------
SERVES_1_AND_2 = {**POINTS, "evictor": replace(POINTS["evictor"], majors=(1, 2))}


@pytest.mark.parametrize(("major", "remedy"), [(0, "pip install --upgrade dist"), (3, "pip install --upgrade engine")])
def test_majors_outside_the_served_range_are_refused_before_import(candidate, major, remedy):
    stale = candidate("evictor", "stale", "does_not_exist:X", major=major)
    registry = Registry([stale], points=SERVES_1_AND_2)
    assert registry.candidates("evictor") == ()
    assert registry.outdated("evictor") == (stale,)
    with pytest.raises(IncompatibleDriverError) as caught:
        registry.find("evictor", "stale")
    assert caught.value.remedy == remedy
    assert f"speaks v{major}, this core serves v1, v2" in caught.value.found
    assert "v1, v2" in caught.value.found


def test_of_several_majors_in_one_distribution_the_highest_served_counts(candidate):
    registry = Registry(
        [candidate("evictor", "x", f"pg:V{major}", major=major) for major in (1, 3, 2, 0)], points=SERVES_1_AND_2
    )
    assert registry.find("evictor", "x").value == "pg:V2"
    assert registry.outdated("evictor") == ()


def test_requires_minor_above_the_interface_is_refused(playground, candidate):
    playground.module("pg_minor", CARD + "        requires_minor = 9\n")
    registry = Registry([candidate("evictor", "x", "pg_minor:Mine")])
    with pytest.raises(IncompatibleDriverError, match=rf"needs interface 0\.9, this core has 0\.{EVICTOR.minor}"):
        registry.card(registry.find("evictor", "x"))


# -- names -----------------------------------------------------------------------------------------------------------
def test_duplicates_name_both_distributions_even_when_they_are_not_neighbours(candidate):
    registry = Registry(
        [
            candidate("evictor", "x", "a:A", "dist-a"),
            candidate("evictor", "y", "b:B", "dist-b"),
            candidate("evictor", "x", "c:C", "dist-c"),
        ]
    )
    assert registry.find("evictor", "y").value == "b:B"
    with pytest.raises(DuplicateDriverError) as caught:
        registry.find("evictor", "x")
    assert "dist-a 1.0" in str(caught.value) and "dist-c 1.0" in str(caught.value)
    assert "pip uninstall dist-a or pip uninstall dist-c" in caught.value.remedy


def test_a_name_twice_in_one_distribution_is_a_duplicate(candidate):
    registry = Registry([candidate("evictor", "x", "a:A"), candidate("evictor", "x", "a:B")])
    with pytest.raises(DuplicateDriverError, match="a:A by dist 1.0 and a:B by dist 1.0"):
        registry.find("evictor", "x")


def test_not_found_says_what_is_installed_and_what_was_meant(candidate):
    registry = Registry([candidate("evictor", "least_recent", "a:A", "dist-a")])
    with pytest.raises(DriverNotFoundError) as caught:
        registry.find("evictor", "Least-Recnt")
    assert "did you mean 'least_recent'?" in caught.value.remedy
    assert "least_recent (dist-a 1.0)" in caught.value.found
    assert (caught.value.point, caught.value.driver) == ("evictor", "Least-Recnt")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("flash", "pip install engine-flashattn"),
        ("flesh", "did you mean 'flash' (pip install engine-flashattn)"),
        ("zyx", "install the distribution that offers it"),
    ],
)
def test_drivers_that_are_known_but_not_installed_have_a_pip_line(candidate, name, remedy):
    with pytest.raises(DriverNotFoundError) as caught:
        Registry([candidate("attention", "torch", "a:A")]).find("attention", name)
    assert caught.value.remedy.startswith(remedy)


def test_the_table_of_known_drivers_fits_the_points_and_the_first_party_packages():
    import engine.plugin.hints as known
    from engine.plugin.points import POINTS

    installed = Registry.discover()
    table = known.known_drivers()
    assert set(table) <= {*POINTS, "commands", "client"}
    for point, drivers in table.items():
        for candidate in installed.candidates(point):
            if candidate.distribution in drivers.values():
                assert drivers.get(candidate.name) == candidate.distribution, f"{point}: {candidate.name}"


def test_not_found_tells_of_a_driver_of_that_name_at_another_point(candidate):
    with pytest.raises(DriverNotFoundError, match="'fifo' is a driver of scheduling_policy"):
        Registry([candidate("scheduling_policy", "fifo", "a:A")]).find("evictor", "fifo")


# -- cards -----------------------------------------------------------------------------------------------------------
def test_card_imports_that_card_alone_and_once(playground, candidate):
    counting = CARD + "\n    import builtins\n    builtins.pg_count = getattr(builtins, 'pg_count', 0) + 1\n"
    playground.module("pg_one", counting)
    playground.module("pg_two", CARD)
    registry = Registry(
        [candidate("evictor", "one", "pg_one:Mine"), candidate("evictor", "two", "pg_two:Mine", "other")]
    )
    first = registry.card(registry.find("evictor", "one"))
    assert first is registry.card(registry.find("evictor", "one"))
    assert first.__module__ == "pg_one"
    assert playground.imported() == {"pg_one"}


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
        ("assert False, 'no'", "AssertionError: no"),
        ("import pg_not_there", "ModuleNotFoundError"),
        ("", "AttributeError"),
    ],
)
def test_whatever_an_import_raises_becomes_one_error(playground, candidate, source, cause):
    playground.module("pg_bad", source)
    registry = Registry([candidate("evictor", "bad", "pg_bad:Mine", "dist-bad")])
    with pytest.raises(DriverImportError) as caught:
        registry.card(registry.find("evictor", "bad"))
    error = caught.value
    assert (error.point, error.driver, error.distribution) == ("evictor", "bad", "dist-bad 1.0")
    assert cause in error.found and "pg_bad:Mine" in error.found
    assert error.__cause__ is not None
    assert ("pip install pg_not_there" in error.remedy) == ("pg_not_there" in source)


def test_ctrl_c_during_an_import_is_not_swallowed(playground, candidate):
    playground.module("pg_stop", "raise KeyboardInterrupt")
    registry = Registry([candidate("evictor", "x", "pg_stop:Mine")])
    with pytest.raises(KeyboardInterrupt):
        registry.card(registry.find("evictor", "x"))


@pytest.mark.parametrize(
    "source",
    [
        "class Mine: pass",
        "Mine = 3",
        "from engine.interfaces.executor import ExecutorCard\nclass Mine(ExecutorCard): pass",
    ],
)
def test_a_card_of_the_wrong_class_is_refused(playground, candidate, source):
    playground.module("pg_wrong", source)
    registry = Registry([candidate("evictor", "x", "pg_wrong:Mine")])
    with pytest.raises(ContractError, match=r"engine\.interfaces\.evictor:EvictorCard"):
        registry.card(registry.find("evictor", "x"))


def test_cards_are_never_instantiated(playground, candidate):
    playground.module("pg_inst", CARD)
    registry = Registry([candidate("evictor", "x", "pg_inst:Mine")])
    with pytest.raises(TypeError, match="never instantiated"):
        registry.card(registry.find("evictor", "x"))()


def test_extra_candidates_stand_beside_the_installed_ones(candidate):
    registry = Registry.discover(extra=[candidate("evictor", "extra", "a:A")])
    assert {"extra", "lru"} <= set(names(registry, "evictor"))
