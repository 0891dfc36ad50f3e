"""Floor 8: the OpenAI-compatible HTTP server over `AsyncLLM`."""
