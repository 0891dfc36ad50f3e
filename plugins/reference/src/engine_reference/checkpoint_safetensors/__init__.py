"""Checkpoint driver `safetensors`: local folders in the Hugging Face layout."""
