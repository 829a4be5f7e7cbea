"""Scheduler policies, one published method a file."""
