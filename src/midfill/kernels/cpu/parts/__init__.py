"""Kernels of attention over parts, compiled when a request first needs them."""
