"""Drafter `draft_model`: a smaller model of the same vocabulary."""
