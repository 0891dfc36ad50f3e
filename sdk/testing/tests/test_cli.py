"""`engine plugins test`: what there is no suite for is said so, with what to do instead."""

from __future__ import annotations

import pytest

from engine.cli.main import main


@pytest.mark.parametrize(
    ("point", "found", "remedy"),
    [
        ("hooks", "there is no suite for it", "run its own tests"),
        ("atention", "there is no such point", "did you mean 'attention'"),
        ("zzz", "there is no such point", "there are suites for: attention"),
    ],
)
def test_a_point_without_a_suite(capsys, point, found, remedy):
    assert main(["plugins", "test", point, "mine"]) == 2
    said = capsys.readouterr().err
    assert f"error: test a driver of point '{point}'" in said and found in said and remedy in said
