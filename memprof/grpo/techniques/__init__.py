"""Memory techniques, each usable by itself: checkpointing, offloading, tiling, packing, prefix sharing."""
