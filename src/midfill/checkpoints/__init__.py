"""Checkpoints on disk: formats, adapters, and where models are fetched from."""
