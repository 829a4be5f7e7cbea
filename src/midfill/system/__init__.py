"""The machine and its files: memory, processes, packages, cache folder, atomic writes, logs."""
