"""Driver `cpu` of the point `attention`."""
