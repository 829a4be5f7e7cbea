"""``midfill top``: a server's metrics in a terminal."""
