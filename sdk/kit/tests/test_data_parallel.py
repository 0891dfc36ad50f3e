"""Which cores are behind a server, by vLLM's flags; and that nobody else joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.settings import EngineConfig
from engine.types.errors import ConfigError
from engine_kit.data_parallel import of_this_server


def found(**settings: Any) -> tuple[int, int, str]:
    named = {f"data_parallel_{name}": value for name, value in settings.items() if not name.startswith("enable")}
    others = {name: value for name, value in settings.items() if name.startswith("enable")}
    config, first, place = of_this_server(EngineConfig(**named, **others))
    return config.data_parallel_size, first, place


EP: dict[str, Any] = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        ({}, (1, 0, "")),
        ({"size": 4}, (4, 0, "")),
        ({"size": 4, "size_local": 4, **EP}, (4, 0, "")),
        ({"size": 4, "rank": 3}, (1, 3, "")),
        ({"size": 4, "rank": 3, "address": "10.0.0.1", "rpc_port": 7}, (1, 3, "")),
        ({"size": 4, "rank": 0, "external_lb": True, **EP}, (1, 0, "tcp://127.0.0.1:29550")),
        ({"size": 4, "rank": 1, "address": "::1", "rpc_port": 7, **EP}, (1, 1, "tcp://[::1]:7")),
        ({"size": 4, "size_local": 2, "hybrid_lb": True}, (2, 0, "")),
        ({"size": 4, "size_local": 2, "start_rank": 2, "hybrid_lb": True, **EP}, (2, 2, "tcp://127.0.0.1:29550")),
        ({"size": 4, "size_local": 4, "hybrid_lb": True, **EP}, (4, 0, "")),
    ],
)
def test_the_cores_of_a_server(settings: dict[str, Any], cores: tuple[int, int, str]) -> None:
    assert found(**settings) == cores


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"size": 4, "external_lb": True}, "--data-parallel-rank"),
        ({"size": 4, "rank": 4}, "the cores 4 to 4"),
        ({"size": 4, "rank": 1, "size_local": 2}, "has one core"),
        ({"size": 4, "rank": 1, "start_rank": 1}, "has one core"),
        ({"size": 4, "hybrid_lb": True}, "--data-parallel-size-local"),
        ({"size": 4, "size_local": 3, "start_rank": 2, "hybrid_lb": True}, "the cores 2 to 4"),
        ({"size": 4, "size_local": 2}, "--data-parallel-hybrid-lb"),
        ({"size": 4, "start_rank": 0}, "--data-parallel-hybrid-lb"),
        ({"size": 4, "address": "10.0.0.1"}, "leave it out"),
        ({"size": 4, "rank": 1, "address": "0.0.0.0", **EP}, "every address"),
        ({"size": 4, "rank": 1, "address": "10.0.0.1", **EP}, "--data-parallel-token-file"),
        ({"size": 4, "rank": 1, "address": "a.host", **EP}, "--data-parallel-token-file"),
        ({"size": 4, "rank": 1, "token_file": "/nowhere/token", **EP}, "No such file"),
        ({"size": 4, "rank": 1, "token_file": "/nowhere/token"}, "leave it out"),
        ({"size": 4, "size_local": 4, "hybrid_lb": True, "token_file": "/nowhere/token", **EP}, "leave it out"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        found(**settings)
    assert says in str(caught.value)


def test_a_token_that_can_be_guessed_is_none(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with pytest.raises(ConfigError, match="can be guessed"):
        found(size=2, rank=1, address="10.0.0.1", token_file=str(token), **EP)
    token.write_text("0123456789abcdef0123456789\n")
    assert found(size=2, rank=1, address="10.0.0.1", token_file=str(token), **EP) == (1, 1, "tcp://10.0.0.1:29550")
