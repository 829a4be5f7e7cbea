"""Searches and trainings whose tables methods are served with."""
