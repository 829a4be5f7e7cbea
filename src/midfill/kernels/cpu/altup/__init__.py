"""The forward pass of models whose hidden rows have several streams."""
