"""The suite of point `ops`."""
