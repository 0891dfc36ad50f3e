"""What the suite of engine-sdk is told of a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from lmcache_stores import KINDS, AnyStore

from engine.interfaces.kv_connector import KVConnectorWorker


class OnStore:
    """One for all tests of a class. `kind`: of `KINDS`."""

    driver = "lmcache"
    kind: ClassVar[str]
    opened: ClassVar[AnyStore]
    options: Mapping[str, Any]
    places = frozenset({"url"})

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def one_of_its_kind(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with KINDS[cls.kind](tmp_path_factory.mktemp("store")) as cls.opened:
            cls.options = {"url": cls.opened.url}
            yield

    @classmethod
    def lose(cls, workers: Sequence[KVConnectorWorker]) -> bool:
        """Remove all objects."""
        cls.opened.clear()
        return True
