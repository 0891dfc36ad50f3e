"""Drafter `mtp`: the target's own layer for further tokens (multi-token prediction)."""
