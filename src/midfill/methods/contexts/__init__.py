"""Methods that compute files apart from each other."""
