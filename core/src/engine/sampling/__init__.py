"""Logits to tokens: the parameters that each slot samples with, and the sampler."""
