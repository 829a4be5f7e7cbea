"""``python -m midfill``: the command line."""

import os
import sys
from contextlib import suppress

with suppress(OSError):  # the current folder may be gone
    if sys.path[:1] == [os.getcwd()]:  # put there by -m: whatever folder a user has opened
        del sys.path[0]

from midfill.cli import main

main()
