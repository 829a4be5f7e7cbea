"""The runner on the CPU kernels."""
