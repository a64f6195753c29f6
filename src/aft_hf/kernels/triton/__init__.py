"""Triton kernels for GPUs. `operators.register` registers them; the package alone does not import Triton."""
