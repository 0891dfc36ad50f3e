"""A form in which checkpoints store weights: whole numbers of 8 bits, which stand for three times as much."""
