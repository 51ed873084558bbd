"""Compare the ranks of one distributed run from a few kilobytes of each, without torch."""
