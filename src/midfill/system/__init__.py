"""The machine and its files: cores, memory, control groups, the cache folder, atomic writes."""
