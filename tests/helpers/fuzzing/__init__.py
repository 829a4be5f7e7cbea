"""Fuzzing: what is fed with arbitrary bytes, from which seeds, and how bytes are mutated."""
