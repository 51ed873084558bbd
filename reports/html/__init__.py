"""Render the document as a self-contained HTML page."""
