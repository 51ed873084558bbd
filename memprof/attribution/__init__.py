"""Decide what every allocation is for, and say what shows it (see ``docs/attribution.md``)."""
