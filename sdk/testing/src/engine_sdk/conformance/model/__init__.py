"""The suites of point `model`: for decoders, and for encoders."""
