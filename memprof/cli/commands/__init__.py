"""One file per command; wiring only."""
