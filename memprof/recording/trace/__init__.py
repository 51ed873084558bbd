"""Record by tensor trace: a dispatch mode that sees every storage's birth and death."""
