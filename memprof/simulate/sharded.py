"""FSDP2 on one of many ranks, none of them there: torch's own ``fully_shard`` over a process group that only pretends.

Collectives of torch's fake group return at once; what they allocate is what a rank allocates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memprof.errors import UsageError
from memprof.simulate.fakes import patched
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.recorder import FakeRecorder
    from memprof.simulate.session import FakeSession

__all__ = ["count_shards", "fake_group", "hold_buckets", "shard", "shards_planned_unseen"]


@contextmanager
def fake_group(world: int) -> Iterator[Any]:
    """A device mesh of ``world`` ranks of which this process plays the first; made outside the fake world.

    Raises:
        UsageError: this process is already part of a real group.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError("this process belongs to a process group; simulate several GPUs in a process of its own.")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


@contextmanager
def shards_planned_unseen(recorder: FakeRecorder) -> Iterator[None]:
    """DTensor plans operations by running them on whole fake tensors, which no device ever holds: not counted."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.paused += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            recorder.paused -= 1

    with patched((ShardingPropagator, name, unseen)):
        yield


def shard(model: Any, mesh: Any, *, trained: bool) -> None:
    """Shard every layer and the rest of the model, as accelerate does, and count this rank's shards.

    Parameters are computed with in bfloat16 and reduced in it; call it with recording paused, since no rank of a
    real run holds the whole model.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wanted = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in wanted:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model.requires_grad_(trained)


def count_shards(model: Any, recorder: FakeRecorder) -> None:
    """Tell the recorder of a sharded model's local parameters and buffers."""
    for parameter in model.parameters():
        recorder.birth(parameter._local_tensor if hasattr(parameter, "_local_tensor") else parameter)
    for buffer in model.buffers():
        recorder.birth(buffer)


_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # torch's defaults for DistributedDataParallel


def hold_buckets(model: Any, session: FakeSession) -> None:
    """DistributedDataParallel's gradient buckets, modelled: flat copies of every trainable gradient, kept all along."""
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    filled, limit = 0, _FIRST_BUCKET
    for size in reversed(sizes):
        filled += size
        if filled >= limit:
            session.fake_recorder.hold(filled, Category.COMMUNICATION, session.book, "gradient bucket")
            filled, limit = 0, _BUCKET
    if filled:
        session.fake_recorder.hold(filled, Category.COMMUNICATION, session.book, "gradient bucket")
