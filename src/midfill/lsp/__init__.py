"""A language server: completions of a midfill server for editors that speak LSP."""
