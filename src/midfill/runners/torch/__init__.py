"""The runner in torch: the reference, and CUDA."""
