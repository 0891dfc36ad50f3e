"""Communicator `custom_allreduce` through the suite of engine-sdk."""

from typing import ClassVar

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")

from engine_sdk.conformance import CommunicatorConformance


@pytest.mark.slow
@pytest.mark.xdist_group("communicators")
class TestCustomAllReduceInterpreted(CommunicatorConformance):
    """Its kernels interpreted, in processes that share the processor's memory as GPUs share theirs."""

    driver, stand_in = "custom_allreduce", "interpreted"


@pytest.mark.gpu
@pytest.mark.xdist_group("communicators")
class TestCustomAllReduce(CommunicatorConformance):
    """Processes that share one GPU, whose contexts take turns: right, and slow."""

    driver, device, platform_options = "custom_allreduce", "cuda", {"ranks_per_device": 8}


@pytest.mark.gpu
@pytest.mark.xdist_group("communicators")
class TestCustomAllReduceInTwoShots(CommunicatorConformance):
    driver, device, platform_options = "custom_allreduce", "cuda", {"ranks_per_device": 8}
    options: ClassVar = {"one_shot_bytes": 64}
