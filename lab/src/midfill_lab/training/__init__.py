"""Training: documents to infilling examples, and the trainer that teaches a model with them."""
