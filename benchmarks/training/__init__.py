"""How the default model's adapter is trained: plans of several stages over published packages."""
