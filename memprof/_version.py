"""State the version; no other file does."""

__version__ = "0.1.0.dev0"
