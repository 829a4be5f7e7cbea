"""The bound of each phase, batch and context beside what is reached: ``midfill bench ceiling``."""
