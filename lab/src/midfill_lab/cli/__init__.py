"""Commands that join those of midfill."""
