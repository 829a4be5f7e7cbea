"""What editing sessions cost as each editor plugin sends them, counted without running a model."""
