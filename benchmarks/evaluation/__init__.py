"""The generator of docs/evaluation.md, and the held-out files that it measures on."""
