"""Triton kernels, each behind a plain function. They know tensors and sizes, never sessions."""
