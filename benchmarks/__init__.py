"""Measures midfill for its own documentation; run as ``python -m benchmarks NAME``."""
