"""Driver `custom_allreduce` of the point `communicator`."""
