"""Attention over slots in torch, on any device."""
