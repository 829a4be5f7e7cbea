"""Methods that keep keys at few bits, in cells of the one KV pool."""
