"""The corpus that the default model's adapter is trained on: files of published packages."""
