"""Driver `triton_gemv` of point `ops`: the linear layer for few rows."""
