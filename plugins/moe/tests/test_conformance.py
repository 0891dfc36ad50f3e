"""Operations and experts through the suite of engine-sdk."""

from typing import ClassVar

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import ExpertsConformance, OpsConformance


class TestMoe(OpsConformance):
    driver = "moe"
    quick = r"card|known|body|rout|expert|gate"  # the others are operations of other drivers


class TestLocal(ExpertsConformance):
    driver = "local"


class TestGather(ExpertsConformance):
    driver = "gather"


class TestGatherMoves(ExpertsConformance):
    """Copies, dealt anew every other step, one expert at a time."""

    driver = "gather"
    options: ClassVar = {"redundant": 3, "rebalance_every": 2, "step_bytes": 1}
    quick = r"beside_steps|rank_holds"


class TestAllToAll(ExpertsConformance):
    driver = "all_to_all"
    quick = r"loop_over_tokens.*(one by one|turned)|fewer|rank_holds|what_cannot"


class TestAllToAllMoves(ExpertsConformance):
    driver = "all_to_all"
    options: ClassVar = {"redundant": 2, "rebalance_every": 3, "step_bytes": "1MiB"}
    quick = r"beside_steps"
