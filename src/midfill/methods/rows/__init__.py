"""Methods that drop rows of a prompt between layers."""
