"""Driver `triton` of point attention: paged attention in Triton kernels."""
