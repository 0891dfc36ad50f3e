"""What chat, messages and responses have in common: from what a body says to a request of the engine, and from a
completion to what an answer tells."""
