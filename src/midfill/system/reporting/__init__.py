"""Presentation of results: tables, sections of documents, sizes."""
