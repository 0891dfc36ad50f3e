"""The machine's own processor and memory, through plain torch."""
