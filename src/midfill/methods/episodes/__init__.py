"""Methods that keep a small cache per topic of a conversation, of which a question picks one."""
