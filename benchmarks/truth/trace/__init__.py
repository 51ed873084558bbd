"""Run a trainer and record the life of every storage it makes, with its Python stack."""
