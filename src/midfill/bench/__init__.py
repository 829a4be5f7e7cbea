"""Speed: loads, measurements, tables and plots."""
