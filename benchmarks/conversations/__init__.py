"""How well a small cache per topic answers questions about long conversations."""
