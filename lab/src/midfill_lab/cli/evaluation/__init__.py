"""The ``midfill eval`` commands, a file each."""
