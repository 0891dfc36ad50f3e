"""Weights that a checkpoint stores in fewer bits: which layers are, how they are read, and products with them."""
