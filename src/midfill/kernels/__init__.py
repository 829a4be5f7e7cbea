"""Numeric kernels; each has a naive reference in the tests."""
