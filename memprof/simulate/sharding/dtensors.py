"""Play one rank of a device mesh, in torch's fake process group, whose collectives return at once.

A rank holds its shards of a model divided into DTensors, not the tensors that torch plans with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memprof.compat import patching
from memprof.compat import torch_sharding as sharding_names
from memprof.compat.check import fault_of
from memprof.compat.targets import Target
from memprof.errors import UsageError
from memprof.simulate.recorder.recorder import FakeRecorder


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


@contextmanager
def shards_planned_unseen(recorder: FakeRecorder) -> Iterator[None]:
    """Leave out the whole fake tensors on which DTensor plans an operation: no device ever holds them."""
    original = sharding_names.PLANNING.get()

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.storages.unseen():
            return original(self, *args, **kwargs)

    with patching((sharding_names.PLANNING, unseen), *_arguments_looked_through_once()):
        yield


def _arguments_looked_through_once() -> list[tuple[Target, Any]]:
    """List what is replaced so that torch looks through an operation's arguments once for strided shards.

    Torch itself looks once for each tensor, which takes seconds in an optimizer's step on hundreds of parameters.
    """
    if fault_of(sharding_names.STRIDED_FLAG) or fault_of(sharding_names.STRIDED_SHARD):
        return []
    original, kind = sharding_names.STRIDED_FLAG.get(), sharding_names.STRIDED_SHARD.get()
    asked: tuple[Any, bool] = (None, False)

    def propagate(strategy: Any, schema: Any) -> None:
        nonlocal asked
        if asked[0] is not schema:
            asked = (schema, any(isinstance(part, kind) for spec in schema.args_spec for part in spec.placements))
        if asked[1]:
            original(strategy, schema)

    return [(sharding_names.STRIDED_FLAG, propagate)]


def count_shards(model: Any, recorder: FakeRecorder) -> None:
    """Tell the recorder of a sharded model's local parameters and buffers."""
    for parameter in model.parameters():
        recorder.storages.birth(sharding_names.LOCAL_TENSOR.of(parameter, parameter))
    for buffer in model.buffers():
        recorder.storages.birth(buffer)
