"""The commands `serve` and `run-batch`."""
