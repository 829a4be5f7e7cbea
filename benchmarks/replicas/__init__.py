"""Replicas of one model on Ray: what routing keeps of the cache, and what a lost replica costs."""
