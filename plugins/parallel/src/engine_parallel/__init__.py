"""Data parallel serving."""
