"""Watch a run that has no Trainer of ours: attach to a worker, or run somebody's script as it is."""
