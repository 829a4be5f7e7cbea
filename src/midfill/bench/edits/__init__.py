"""Editing sessions: what they cost under each prompt layout, counted and replayed."""
