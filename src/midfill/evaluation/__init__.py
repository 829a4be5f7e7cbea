"""Evaluation: how good a model's answers are, on public problems and on the user's own files."""
