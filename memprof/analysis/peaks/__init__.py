"""Find peaks that the timeline of one device does not show: those the history lost, and other devices'."""
