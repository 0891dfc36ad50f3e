"""Drivers for GPUs, on CUDA graphs, Triton kernels and NCCL."""
