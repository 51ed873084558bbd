"""One micro-batch's forward and backward, in pieces."""
