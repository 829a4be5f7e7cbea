"""A step: batch, forward pass, verification, commit."""
