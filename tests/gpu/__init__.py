"""`make gpu-check`: what only a machine with a GPU shows, by one command in one table. See docs/benchmarks/gpu.md."""
