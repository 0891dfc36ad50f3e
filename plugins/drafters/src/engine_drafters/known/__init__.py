"""Drafter `known`: answers that were recorded before, copied with mistakes."""
