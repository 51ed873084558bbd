"""Record a run and report on it, whoever drives it: shared by the callback and the packages that import it."""
