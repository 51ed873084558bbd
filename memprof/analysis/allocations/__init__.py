"""Fold and describe allocations for reports."""
