"""What a method of KV reuse may look at and decide."""
