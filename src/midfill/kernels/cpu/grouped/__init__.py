"""Kernels of attention over keys in two groups, compiled apart from the others when needed."""
