"""Flags are made from the declarations, in either spelling."""

from __future__ import annotations

import argparse
import os

import pytest

from engine.cli.main import canonical
from engine.config.declaration import EngineSettings
from engine.config.settings import EngineConfig
from engine.config.sources import Key
from engine.plugin.points import POINTS
from engine_kit.flags import add_engine_flags, merged_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ENGINE_")]:
        monkeypatch.delenv(name)


def parse(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add_engine_flags(parser)
    return merged_settings(parser.parse_args(canonical(arguments)))


EXAMPLES = {
    "text": "x", "integer": "3", "number": "0.5", "bytes": "1GiB", "step_timeout": "30",
    "default_chat_template_kwargs": "{}", "override_generation_config": "{}",
    "pipeline_parallel_split": "1,2",
}  # fmt: skip


@pytest.mark.parametrize("setting", EngineSettings.declared.values(), ids=lambda s: s.name)
def test_every_setting_has_a_flag_with_dashes_or_underscores(setting):
    if setting.type == "boolean":
        for flag, value in ((setting.flag, True), ("--no-" + setting.name, False), (f"--{setting.name}", True)):
            assert parse(flag).section("settings") == {setting.name: value}
        return
    value = setting.choices[-1] if setting.choices else EXAMPLES.get(setting.name, EXAMPLES[setting.type])
    for arguments in ([setting.flag, value], [f"--{setting.name}={value}"]):
        merged = parse(*arguments)
        assert merged.section("settings") == {setting.name: [value] if setting.repeatable else value}
        assert merged.origins == {Key("settings", setting.name): f"flag {setting.flag}"}
        EngineConfig.from_merged(merged)


@pytest.mark.parametrize("point", POINTS.values(), ids=lambda p: p.name)
def test_every_point_has_a_flag_and_options(point):
    merged = parse(point.option_flag, "one", f"--{point.name}.num_splits", "4", f"--{point.keyword}.other-name=a=b")
    assert merged.choice(point.name) == ("one", f"flag {point.option_flag}")
    assert merged.options() == {point.name: {"num_splits": "4", "other_name": "a=b"}}


def test_options_may_be_json_lists_and_mappings():
    merged = parse("--attention.sizes", "[1, 2]", '--attention.map={"a": 1}', "--attention.text", "[not json")
    assert merged.options()["attention"] == {"sizes": [1, 2], "map": {"a": 1}, "text": "[not json"}


def test_what_follows_two_dashes_is_left_alone():
    assert canonical(["--a_b", "--", "--c_d", "--e.f"]) == ["--a-b", "--", "--c_d", "--e.f"]


def test_values_are_left_alone():
    assert canonical(["--model=my_model/v1.5", "a_b.c"]) == ["--model=my_model/v1.5", "a_b.c"]


def test_nothing_given_is_nothing_set():
    assert parse().values == {}


def test_config_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("max_num_seqs: 5")
    assert parse("--config", str(path)).section("settings") == {"max_num_seqs": 5}
