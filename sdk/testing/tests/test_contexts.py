"""What the kit builds drivers with: a platform that is installed and broken is in nobody's way."""

from __future__ import annotations

import pytest

from engine.plugin import Registry
from engine.plugin.candidate import Candidate
from engine_sdk.conformance.contexts import platform_card_of

HOST = next(c for c in Registry.discover().candidates("platform") if c.distribution == "engine-reference")
BROKEN = Candidate("platform", "absent", 0, "engine-absent", "1.0", "a_platform_that_is_not_there:Card")


def test_a_broken_platform_is_passed_over():
    registry = Registry([BROKEN, HOST])
    assert platform_card_of("cpu", registry) is registry.card(HOST)
    assert BROKEN in registry.quarantine


def test_where_no_platform_is_left_the_broken_ones_are_named():
    with pytest.raises(
        LookupError, match=r"no installed platform is for device cpu; absent \(engine-absent 1.0\): broken"
    ):
        platform_card_of("cpu", Registry([BROKEN]))
