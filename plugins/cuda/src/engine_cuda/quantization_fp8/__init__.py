"""Driver `fp8` of the point `quantization`."""
