"""Settings of a run, GPUs and model configs, read from trainers and recordings. No torch here."""
