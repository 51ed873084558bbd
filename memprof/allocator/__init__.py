"""Model the CUDA caching allocator: its rules (:mod:`.model`) and its settings (:mod:`.settings`)."""

from memprof.allocator.model import CachingAllocator, OutOfMemory

__all__ = ["CachingAllocator", "OutOfMemory"]
