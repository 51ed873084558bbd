"""Simulate one rank of many: DDP, FSDP2, tensor parallelism, ZeRO."""
