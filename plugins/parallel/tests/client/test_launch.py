"""When several engine cores are asked for: what is refused before anything starts."""

from __future__ import annotations

import pytest

from engine import EngineArgs
from engine.frontend.launch import launch
from engine.plugin import Registry
from engine.plugin.candidate import Candidate
from engine.plugin.points import ROUTER
from engine.types.errors import ConfigError, DriverNotFoundError, DuplicateDriverError, UnfitDriverError


def test_a_router_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="one engine core"):
        launch(EngineArgs(model="tiny", router="least_loaded"))
    with pytest.raises(ConfigError, match="one engine core"):
        launch(EngineArgs(model="tiny", data_parallel_restarts=1))
    with pytest.raises(ConfigError, match="one engine core"):
        launch(EngineArgs(model="tiny", **{"router.kv_weight": 1}))
    with pytest.raises(UnfitDriverError, match="prefix caching is off"):
        launch(EngineArgs(model="tiny", data_parallel_size=2, router="prefix_aware", enable_prefix_caching=False))
    plan = launch(EngineArgs(model="tiny", data_parallel_size=2))
    assert [selection.candidate.name for selection in plan.chosen(ROUTER)] == ["least_loaded"]


def test_without_this_package_it_is_named() -> None:
    found = [candidate for candidate in Registry.discover().found if candidate.distribution != "engine-parallel"]
    launch(EngineArgs(model="tiny"), Registry(found))
    with pytest.raises(DriverNotFoundError, match="pip install engine-parallel"):
        launch(EngineArgs(model="tiny", data_parallel_size=2), Registry(found))


def test_of_two_such_packages_neither_is_taken() -> None:
    other = Candidate("client", "clusters", 0, "engine-clusters", "2.0", "clusters:Client")
    with pytest.raises(DuplicateDriverError, match="pip uninstall engine-clusters"):
        launch(EngineArgs(model="tiny", data_parallel_size=2), Registry.discover([other]))
