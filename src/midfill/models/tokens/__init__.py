"""Text to token ids and back, and token healing."""
