"""The forward pass of models with attention sinks, which few users need."""
