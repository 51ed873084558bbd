"""Rebuild allocation lifetimes, block sizes and reserved memory from a snapshot's trace."""
