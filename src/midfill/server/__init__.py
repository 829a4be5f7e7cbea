"""HTTP: the dialects clients speak."""
