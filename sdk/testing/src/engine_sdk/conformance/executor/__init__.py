"""The suite of point `executor`."""
