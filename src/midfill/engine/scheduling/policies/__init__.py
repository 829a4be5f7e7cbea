"""Scheduling policies, one published method per file."""
