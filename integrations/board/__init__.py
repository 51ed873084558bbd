"""Show recordings in TensorBoard's Memory tab."""
