"""What measures, evaluates, calibrates and trains models; its commands join those of midfill."""

__version__ = "0.1.0"
