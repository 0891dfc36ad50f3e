"""Drafter `eagle`: a head of one layer that goes on with the target's features."""
