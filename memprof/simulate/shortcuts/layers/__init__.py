"""Repeat the layers of a model that are alike, in passes without gradients."""
