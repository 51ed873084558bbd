"""Save memory by techniques that work each by itself: checkpointing, offloading, tiling, packing, prefix sharing."""
