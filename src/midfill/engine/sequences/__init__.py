"""Sequences' state, the queues they wait in, and counters."""
