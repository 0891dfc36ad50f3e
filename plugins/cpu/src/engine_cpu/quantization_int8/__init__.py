"""Driver `int8` of the point `quantization`."""
