"""What a method that drops rows of a prompt between layers may look at and decide."""
