"""DeepGEMM as a quantization driver."""
