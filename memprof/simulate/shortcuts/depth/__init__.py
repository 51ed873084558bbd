"""Derive what a deep model allocates from three shallow ones, event by event."""
