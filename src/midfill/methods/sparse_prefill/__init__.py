"""What a method of sparse prefill may look at and decide."""
