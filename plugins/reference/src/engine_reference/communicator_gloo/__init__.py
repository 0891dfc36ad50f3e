"""Collectives over gloo, between processes of one machine."""
