"""Model drivers: the Llama family."""
