"""Makes the stores importable, and opens one of each kind."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lmcache_stores import KINDS, AnyStore, those


@pytest.fixture(scope="module", params=those(*KINDS))
def kept_in(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyStore]:
    """A store of each kind that there is here."""
    with KINDS[request.param](tmp_path_factory.mktemp("store")) as store:
        yield store
