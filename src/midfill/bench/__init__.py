"""Benchmarks of speed: loads, measurements, tables and plots."""
