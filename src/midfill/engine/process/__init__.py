"""The engine's own process and its client."""
