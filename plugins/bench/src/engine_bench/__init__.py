"""Measurements of an engine: `engine bench`. How each figure is computed stands in docs/benchmarks/method.md."""
