"""Humming as a quantization driver."""
