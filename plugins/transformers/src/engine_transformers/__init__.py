"""Decoders by the modules of the transformers library, on Engine's attention, cache, scheduler and sampler."""
