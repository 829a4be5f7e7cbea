"""Runners: implementations of the forward pass, on CPU kernels and in torch."""
