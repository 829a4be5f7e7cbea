"""Prefill and decode on workers of their own: how long that takes, and which workers serve most."""
