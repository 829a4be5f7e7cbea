"""Methods for models with latent attention whose latents are kept in parts."""
