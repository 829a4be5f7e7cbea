"""``midfill bench serving``: a load of timed requests, on a server or on a simulated engine."""
