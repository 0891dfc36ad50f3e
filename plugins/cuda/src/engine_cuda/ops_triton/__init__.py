"""Driver `triton` of point `ops`."""
