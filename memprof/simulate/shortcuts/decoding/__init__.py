"""Repeat a generation's decoding steps from the logs of a few of them."""
