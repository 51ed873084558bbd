"""Model the allocator in C, where that was built: see :mod:`memprof.allocator.native`."""

from memprof.allocator.native import allocator, reserved_within

__all__ = ["allocator", "reserved_within"]
