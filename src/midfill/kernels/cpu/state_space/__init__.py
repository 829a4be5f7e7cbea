"""Layers with a state instead of KV (Mamba-2, the delta rule); compiled when a model has them."""
