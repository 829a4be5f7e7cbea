"""Published methods, one file each; ``registry`` finds them by name."""
