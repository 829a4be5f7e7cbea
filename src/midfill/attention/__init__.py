"""Attention over slots, device-agnostic: which keys a query looks at, and the sum over them."""
