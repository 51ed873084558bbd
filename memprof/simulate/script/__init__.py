"""Simulate an existing training script: run it up to its ``trainer.train()``, and simulate that instead."""
