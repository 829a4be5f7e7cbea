"""Models on disk and as forward passes."""
