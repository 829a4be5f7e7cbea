"""What sparse prefill saves and loses, beside dense attention and plain baselines."""
