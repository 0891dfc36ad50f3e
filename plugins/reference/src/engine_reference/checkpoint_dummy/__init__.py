"""Checkpoint driver `dummy`: models of real dimensions with random weights, for measurements without a download."""
