"""Anthropic's API: messages."""
