"""Executor `inline`: one worker, on the caller's thread."""
