"""Find failures in a text, however it is bent: where to look, what matches, what belongs together."""
