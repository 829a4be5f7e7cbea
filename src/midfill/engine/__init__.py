"""Continuous batching: requests, scheduling, sampling, the step loop and its process."""
