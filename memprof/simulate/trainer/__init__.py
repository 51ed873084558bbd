"""Run TRL's own trainer, or a script's, on fake tensors."""
