"""Driver `pynccl` of the point `communicator`."""
