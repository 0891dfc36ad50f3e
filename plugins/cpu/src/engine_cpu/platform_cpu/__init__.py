"""Driver `cpu` of the point `platform`."""
