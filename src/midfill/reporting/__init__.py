"""Results for people: tables, documents, plots."""
