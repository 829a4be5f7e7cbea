"""``python -m midfill``: the command line."""

from midfill.cli import main

main()
