"""Driver `prefix` of the point `evictor`."""
