"""Hold the simulator against the real CUDA allocator, on an emulated device."""
