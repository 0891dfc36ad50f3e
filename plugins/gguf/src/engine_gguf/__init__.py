"""GGUF files: checkpoint, tokenizer and weights."""
