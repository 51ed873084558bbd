"""Pages, tables and files made from answers: one document, one renderer for each format."""
