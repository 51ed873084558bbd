"""Fill the documentation with measured figures: ``python -m benchmarks.docs COMMAND``."""
