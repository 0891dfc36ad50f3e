"""Driver `cpu` of the point `ops`."""
