"""Editing sessions: their cost under each prompt layout, counted and replayed."""
