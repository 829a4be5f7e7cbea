"""Evaluation: quality of a model's answers, on public problems and on the user's own files."""
