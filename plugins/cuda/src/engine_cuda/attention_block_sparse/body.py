"""The body of the block-sparse attention: with kernels where there are any, else in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_cuda.attention_block_sparse.plain import PlainBlockSparse
from engine_cuda.interpreter import wrong_device

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class BlockSparseBody(PlainBlockSparse):
    """See `engine.interfaces.attention.AttentionBackend`. Built where kernels run, it is a `TritonBlockSparse`."""

    def __new__(cls, context: WorkerContext) -> Any:
        if context.options.plain or wrong_device(str(context.device)):
            return super().__new__(cls)
        from engine_cuda.attention_block_sparse.triton_body import TritonBlockSparse  # imports Triton

        return TritonBlockSparse(context)
