"""Attention over fixed patterns of blocks: driver `block_sparse`, in Triton on a GPU and in plain torch elsewhere."""
