"""Multi-head latent attention; compiled when a model has it."""
