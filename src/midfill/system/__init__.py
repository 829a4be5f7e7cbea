"""The machine and its files: cores, memory, the cache folder, atomic writes."""
