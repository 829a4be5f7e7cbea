"""Methods that compute a part of a prompt's attention."""
