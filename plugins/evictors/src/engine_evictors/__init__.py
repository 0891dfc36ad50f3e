"""Evictors beside the reference one."""
