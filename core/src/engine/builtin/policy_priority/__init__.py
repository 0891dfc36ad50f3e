"""The scheduling policy `priority`."""
