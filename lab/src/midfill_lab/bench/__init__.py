"""What a user measures on their own machine and model."""
