"""midfill serves language models for infilling and computes only what an edit changed."""

__version__ = "0.1.0"
