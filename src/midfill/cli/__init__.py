"""The command line. Each command has a file here; heavy imports wait until a command runs."""

import sys


def main() -> None:
    """Run the command line; a MidfillError becomes one line on standard error and exit status 1."""
    from midfill.cli.app import app
    from midfill.errors import MidfillError

    try:
        app()
    except MidfillError as error:
        sys.stderr.write(f"midfill: {error}\n")
        sys.exit(1)
