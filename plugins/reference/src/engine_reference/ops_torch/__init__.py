"""The reference operations, on plain torch."""
