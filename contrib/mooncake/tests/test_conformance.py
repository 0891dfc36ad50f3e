"""`mooncake` through the suite of engine-sdk."""

from collections.abc import Iterator, Sequence

import pytest
from mooncake_master import SEGMENT, Master, why_not

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine.interfaces.kv_connector import KVConnectorWorker
from engine_sdk.conformance import KVConnectorConformance


@pytest.mark.skipif(bool(why_not()), reason=why_not())
class TestMooncake(KVConnectorConformance):
    driver, options, places = "mooncake", {"segment_size": SEGMENT}, frozenset({"master"})

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def master(cls) -> Iterator[None]:
        """One for all tests."""
        master = Master()
        cls.options = {**cls.options, "master": master.address}
        yield
        master.end()

    @classmethod
    def lose(cls, workers: Sequence[KVConnectorWorker]) -> bool:
        """Remove all objects."""
        for worker in workers:
            worker._client._store.remove_all(True)  # type: ignore[attr-defined]
        return True
