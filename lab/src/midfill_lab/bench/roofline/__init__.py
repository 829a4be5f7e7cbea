"""What a step must take: a machine's ceilings, and what a model requires of it."""
