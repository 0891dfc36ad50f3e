"""Floor 3: process groups: collectives over the communicators that were chosen."""
