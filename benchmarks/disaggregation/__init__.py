"""DistServe on this machine: two workers, their simulation, and one engine, under one load."""
