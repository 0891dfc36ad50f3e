"""Driver `local` of the point `experts`."""
