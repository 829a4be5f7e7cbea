"""Triton kernels of the CUDA runner: what PyTorch would do in several launches each."""
