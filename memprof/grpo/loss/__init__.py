"""Log-probabilities without whole logits."""
