"""Drafters for Engine: they propose tokens, which the engine checks (point `drafter`)."""
