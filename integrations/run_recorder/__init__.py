"""Record a run and report on it, whoever drives it: what the callback and the rooms above share."""
