"""The command line. Each command has a file here; heavy imports wait until a command runs."""

import sys


def main() -> None:
    """Run the command line; an error becomes one line on standard error."""
    from midfill.cli.app import app
    from midfill.errors import MidfillError, OptionError

    try:
        app()
    except MidfillError as error:
        sys.stderr.write(f"midfill: {error}\n")
        sys.exit(2 if isinstance(error, OptionError) else 1)
