"""Hold the lean trainer against TRL."""
