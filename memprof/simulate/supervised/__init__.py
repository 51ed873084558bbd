"""Simulate trainers whose rows are given: TRL's supervised fine-tuning and direct preference optimisation."""
