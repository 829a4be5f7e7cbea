"""Entropy coding of stored KV, compiled apart from the other kernels when first needed."""
