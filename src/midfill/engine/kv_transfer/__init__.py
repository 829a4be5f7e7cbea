"""KV to and from other places: tiers, other engines."""
