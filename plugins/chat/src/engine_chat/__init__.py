"""A model in the terminal: `engine chat` converses, `engine generate` goes on from one prompt."""
