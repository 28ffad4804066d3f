"""All SQL of the search service."""
