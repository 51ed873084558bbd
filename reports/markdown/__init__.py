"""Markdown, for issues, pull requests and chats."""
