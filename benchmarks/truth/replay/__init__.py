"""Replay a labelled stream through a model of the caching allocator, into a snapshot with its truth."""
