"""Executor `process`: a child process for each rank."""
