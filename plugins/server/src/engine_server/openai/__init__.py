"""OpenAI's API: chat, completions and models."""
