"""Checkpoints on disk: file formats, adapters, and where models are downloaded from."""
