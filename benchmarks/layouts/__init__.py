"""Prompt layouts of editing sessions, counted without a model."""
