"""Compute log-probabilities without whole logits."""
