"""Simulate one rank of many: FSDP2, tensor parallelism, ZeRO."""
