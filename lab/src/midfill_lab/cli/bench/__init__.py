"""The ``midfill bench`` commands, a file each."""
