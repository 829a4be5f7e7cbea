"""Kernels of sparse prefill, compiled apart from the others when a method first needs them."""
