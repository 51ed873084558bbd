"""Repeat the layers of a model that are alike, where nothing is differentiated."""
