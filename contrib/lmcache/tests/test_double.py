"""`lmcache` through the suite of engine-sdk, without the library. The table of capabilities, which is of the library,
does not look here."""

import pytest
from lmcache_suite import OnStore

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import KVConnectorConformance as Suite


class TestDouble(OnStore, Suite):
    kind = "double"
    test_card_is_light = None  # it asks a process of its own, in which there is no double


del Suite  # or it is collected, too
