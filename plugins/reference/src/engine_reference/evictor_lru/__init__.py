"""Evictor `lru`: least recently used first."""
