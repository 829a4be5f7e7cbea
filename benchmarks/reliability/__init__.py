"""Promises about failures, overload and long runs, measured on a server as users run it."""
