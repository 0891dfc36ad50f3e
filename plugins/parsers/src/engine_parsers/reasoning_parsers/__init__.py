"""Reasoning parsers: how families of models mark their thoughts."""
