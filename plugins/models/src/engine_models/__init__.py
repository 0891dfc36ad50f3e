"""Model drivers: the decoders that people run, beside the Llama family."""
