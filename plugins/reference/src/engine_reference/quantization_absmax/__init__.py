"""Quantization driver `absmax`: rounded weights in plain torch, the reference for faster drivers."""
