"""Render the document for a terminal."""
