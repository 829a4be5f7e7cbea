"""The forward pass of models that norm all heads of a query or key together."""
