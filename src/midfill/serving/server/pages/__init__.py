"""Pages for browsers. Their sources are in web/; ``make web`` builds what ``built/`` holds."""
