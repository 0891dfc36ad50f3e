"""The suite of point `attention`."""
