"""The engine on a GPU that is not there: `make gpu-rehearsal`. See docs/benchmarks/gpu.md.

torch's CUDA build and Triton's own launcher run over a driver, a runtime and libraries (`native/`) that keep every rule
of streams, events, captures and memory, count each call, and compute nothing. So the host's side of a step is the real
one; what a kernel would have written reads as zeros.

The fake libraries read FAKEGPU_COUNT (of GPUs, up to 8), FAKEGPU_LAZY (work runs once somebody waits for it),
FAKEGPU_BYTES (device memory is true memory, of the host: for small models alone), FAKEGPU_IPC (memory that processes
share) and FAKEGPU_LOG (the file of what they find).
"""
