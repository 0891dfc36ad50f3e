"""Floor 6: the engine core: its step loop, and the place where it is put together."""
