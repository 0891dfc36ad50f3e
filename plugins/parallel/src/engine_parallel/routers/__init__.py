"""Routers `least_loaded` and `prefix_aware`: which data-parallel rank takes a request."""
