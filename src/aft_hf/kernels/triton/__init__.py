"""Triton kernels for GPUs. `operators.register` registers them; Triton is imported at their first call."""
