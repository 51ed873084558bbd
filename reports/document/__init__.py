"""The document: what a report says, ready for any renderer."""
