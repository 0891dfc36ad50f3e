"""Driver `int4` of the point `quantization`."""
