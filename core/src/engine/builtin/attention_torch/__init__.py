"""The reference attention, on plain torch."""
