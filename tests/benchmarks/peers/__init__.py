"""Engine beside other engines: same checkpoints, same seeded work, in turns. Run `python -m tests.benchmarks.peers`."""
