"""Run one micro-batch forward and backward, in pieces."""
