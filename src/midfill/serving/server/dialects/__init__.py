"""Dialects: one file per client API. Each translates into what ModelService takes."""
