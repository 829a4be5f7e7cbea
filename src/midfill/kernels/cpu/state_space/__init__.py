"""Layers with a state instead of KV (Mamba-2); compiled when a model has them."""
