"""Model families: their configurations, and the names and shapes of their tensors."""
