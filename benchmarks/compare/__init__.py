"""Two versions of midfill side by side: the running tree and a commit of its repository."""
