"""HTTP: the dialects clients speak, one file each."""
