"""FlashAttention as an attention driver."""
