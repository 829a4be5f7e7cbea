"""Methods that keep some of a prompt's keys and drop the others."""
