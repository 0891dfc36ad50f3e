"""FlashInfer as an attention driver."""
