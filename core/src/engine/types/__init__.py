"""Floor 0: what travels between the parts. No torch, no I/O, no imports from the floors above."""
