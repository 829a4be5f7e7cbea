"""Where KV goes that has no place in the pool: host memory and disk."""
