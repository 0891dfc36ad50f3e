"""Attention `block_sparse` through the suite of engine-sdk, with a pattern that leaves nothing out: then it is full
attention. In plain torch, interpreted on the processor, and on a GPU where there is one."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from engine_sdk.conformance import AttentionConformance

ALL = {"block": 16, "local": 1000}


class TestBlockSparse(AttentionConformance):
    driver, options = "block_sparse", {**ALL, "plain": True}


@pytest.mark.slow
class TestBlockSparseInterpreted(AttentionConformance):
    """Minutes; `test_block_sparse.py` has the short form of it."""

    driver, options, stand_in = "block_sparse", ALL, "interpreted"
    test_what_some_queries_do_not_see_in_fp8 = None  # the interpreter reads a NaN of 8 bits as a number


@pytest.mark.gpu
class TestBlockSparseOnGPU(AttentionConformance):
    driver, device, options = "block_sparse", "cuda", ALL
