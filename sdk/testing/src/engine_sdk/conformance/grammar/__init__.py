"""The suite of point `grammar`."""
