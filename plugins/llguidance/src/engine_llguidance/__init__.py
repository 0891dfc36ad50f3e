"""Grammar `llguidance`: structured outputs by LLGuidance."""
