"""Pretend to be one of many ranks: torch's fake process group, whose collectives return at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memprof.compat import torch_sharding as sharding_names
from memprof.errors import UsageError


@contextmanager
def fake_group(world: int, name: str = "dp_shard") -> Iterator[Any]:
    """Open a device mesh of ``world`` ranks of which this process plays the first; enter it outside the fake world.

    ``name`` is its dimension's: ``dp_shard`` or ``tp``.

    Raises:
        UsageError: this process is already part of a real group.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        raise UsageError("this process belongs to a process group; simulate several GPUs in a process of its own.")
    dist.init_process_group("fake", rank=0, world_size=world, store=sharding_names.FAKE_STORE.get()())
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=(name,))
    finally:
        dist.destroy_process_group()
