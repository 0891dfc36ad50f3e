"""The record of what was found broken: kept for one version, replaced by what is seen later, and never in the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.frontend.plugin_record import PluginRecord, key
from engine.plugin.candidate import Candidate

MOON = Candidate("evictor", "moon", 0, "engine-moon", "1.0", "engine_moon:Card")
MARS = replace(MOON, name="mars")


@pytest.fixture
def record(tmp_path):
    return PluginRecord(tmp_path / "deep" / "plugins.json")


def test_what_is_broken_is_kept_until_it_is_found_sound(record):
    assert record.read() == {}
    record.write({key(MOON): ("it raised", "mend it")}, [], "engine serve")
    seen = record.read()[key(MOON)]
    assert (seen.found, seen.remedy, seen.by) == ("it raised", "mend it", "engine serve") and len(seen.at) == 16
    record.write({key(MARS): ("it hangs", "")}, [], "engine plugins doctor")
    assert {*record.read()} == {key(MOON), key(MARS)}
    record.write({}, [key(MOON)], "engine serve")
    assert {*record.read()} == {key(MARS)}


def test_an_upgrade_ends_what_is_said_of_a_plugin(record):
    record.write({key(MOON): ("it raised", "")}, [], "engine serve")
    assert key(replace(MOON, version="1.1")) not in record.read()


def test_what_is_known_already_leaves_the_file_alone(record, tmp_path):
    record.write({key(MOON): ("it raised", "")}, [], "engine serve")
    before = record.read()
    path = tmp_path / "deep" / "plugins.json"
    path.chmod(0o400)
    inode = path.stat().st_ino
    record.write({key(MOON): ("it raised", "")}, [key(MARS), key(MOON)], "engine plugins doctor")
    assert record.read() == before and path.stat().st_ino == inode
    record.write({key(MOON): ("something else", "")}, [], "engine plugins doctor")
    assert record.read()[key(MOON)].by == "engine plugins doctor"


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 3}', '{"a": [1]}', "null"])
def test_a_file_that_cannot_be_read_says_nothing(tmp_path, text):
    (tmp_path / "plugins.json").write_text(text)
    assert PluginRecord(tmp_path / "plugins.json").read() == {}


def test_a_place_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    record = PluginRecord(tmp_path / "file" / "plugins.json")
    record.write({key(MOON): ("it raised", "")}, [], "engine serve")
    assert record.read() == {}
