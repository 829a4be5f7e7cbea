"""The version of midfill."""

__version__ = "0.1.0"
