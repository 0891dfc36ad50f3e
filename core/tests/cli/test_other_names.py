"""Who types a flag of `vllm serve` that has another name here is told which."""

from __future__ import annotations

import re

import pytest

from engine.cli.main import main
from engine.cli.other_names import IN_PLACE_OF
from engine.config.declaration import SERVER_SETTINGS, SETTINGS
from engine.plugin.points import POINTS

OURS = {setting.flag for setting in (*SETTINGS, *SERVER_SETTINGS)} | {point.option_flag for point in POINTS.values()}


@pytest.mark.parametrize("flag", ["--gpu-memory-utilization", "--gpu_memory_utilization=0.9", "--api-server-count"])
def test_the_hint(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", flag]) == 2
    said = capsys.readouterr().err
    assert "there is no such flag" in said and IN_PLACE_OF[flag.partition("=")[0].replace("_", "-")] in said


def test_what_hints_name_exists_and_what_they_replace_does_not() -> None:
    assert not OURS & set(IN_PLACE_OF)
    for hint in IN_PLACE_OF.values():
        for named in re.findall(r"--[a-z-]+", hint):
            assert named in OURS, hint
