"""Record fake tensors through the allocator model, and write a snapshot."""
