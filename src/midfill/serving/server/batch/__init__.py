"""Batches of requests: how they are ordered, read, answered and resumed."""
