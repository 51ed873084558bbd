"""Record through the CUDA allocator's own memory history."""
