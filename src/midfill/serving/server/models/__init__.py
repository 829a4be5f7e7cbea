"""Several models in one server: which are in memory, and whose each request is."""
