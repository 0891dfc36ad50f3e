"""`lmcache` through the suite of engine-sdk, in front of three kinds of stores."""

import pytest
from lmcache_stores import why_not
from lmcache_suite import OnStore

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import KVConnectorConformance


@pytest.mark.skipif(bool(why_not("folder")), reason=why_not("folder"))
class TestFolder(OnStore, KVConnectorConformance):
    kind = "folder"


@pytest.mark.skipif(bool(why_not("lm server")), reason=why_not("lm server"))
class TestServer(OnStore, KVConnectorConformance):
    kind = "lm server"


@pytest.mark.skipif(bool(why_not("redis")), reason=why_not("redis"))
class TestRedis(OnStore, KVConnectorConformance):
    kind = "redis"
