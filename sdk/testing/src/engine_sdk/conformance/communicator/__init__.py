"""The suite of point `communicator`."""
