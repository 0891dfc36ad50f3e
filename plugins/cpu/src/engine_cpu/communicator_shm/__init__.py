"""Driver `shm` of the point `communicator`."""
