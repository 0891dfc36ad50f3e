"""Mixtures of experts: routing, and layers of routed experts."""
