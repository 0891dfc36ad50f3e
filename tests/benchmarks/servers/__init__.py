"""Servers beside servers: `engine serve` and others under the same client. How: tests/benchmarks/peers/README.md."""
