"""Evictors beside the builtin one."""
