"""Floor 7: text in, text out. Tokenises, starts and talks to the engine core, makes text of what it sends back."""
