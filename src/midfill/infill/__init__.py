"""Documents, edits and prompt layouts. Text and numbers only: no torch, no I/O."""
