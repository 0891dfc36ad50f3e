"""Driver `gguf_cpu` of the point `quantization`."""
