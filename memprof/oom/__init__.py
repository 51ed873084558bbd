"""Explain out-of-memory texts as people paste them: every number, the cause, what to try. No torch."""
