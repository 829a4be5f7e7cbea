"""KV slots and the radix cache over them."""
