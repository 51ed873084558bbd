"""The world a simulated run sees: fake tensors, attention kernels, autocast rules."""
