"""Record from CPU recordings: a dispatch mode that sees every storage's birth and death."""
