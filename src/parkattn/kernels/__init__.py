"""Triton kernels: tensors in, tensors out. Leaves: they import torch and triton, nothing else of parkattn."""
