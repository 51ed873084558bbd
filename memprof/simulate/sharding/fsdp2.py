"""One of many ranks, none of them there: FSDP2 and tensor parallelism over a process group that only pretends.

Executed: torch's ``fully_shard`` as accelerate calls it, and transformers' tensor-parallel plans.
Collectives of torch's fake group return at once; what they allocate is what a rank allocates.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.simulate.world.fakes import patched
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.recorder.recorder import FakeRecorder
    from memprof.simulate.recorder.session import FakeSession

__all__ = [
    "count_shards",
    "fake_group",
    "gathered_owned",
    "hold_buckets",
    "shard",
    "shard_tensors",
    "shards_planned_unseen",
]


@contextmanager
def fake_group(world: int, name: str = "dp_shard") -> Iterator[Any]:
    """A device mesh of ``world`` ranks of which this process plays the first; made outside the fake world.

    ``name`` is its dimension's: ``dp_shard`` or ``tp``.

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
        yield init_device_mesh("cpu", (world,), mesh_dim_names=(name,))
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


def shard(model: Any, mesh: Any, settings: Settings) -> bool:
    """Shard a model by accelerate's own code: its layers, its embeddings, its head, and what is left.

    Call it with recording paused, since no rank of a real run holds the whole model.

    Returns:
        Whether each layer became a unit of its own. With an adapter, transformers 5 hands accelerate a policy that its
        FSDP2 does not know, and all layers are gathered at once.

    Raises:
        UsageError: the installed accelerate has no FSDP2.
    """
    try:
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    except ImportError:
        raise UsageError("--sharding fsdp2 runs accelerate's own code: install accelerate 1.6 or later.") from None
    from torch.distributed.fsdp import FSDPModule

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    if settings.mixed_precision != "no":
        plugin.set_mixed_precision(settings.mixed_precision)
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=types.SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision=settings.mixed_precision,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    if getattr(model, "peft_config", None) is not None:
        _as_transformers_would(model, accelerator)
    fsdp2_prepare_model(accelerator, model)
    return sum(isinstance(m, FSDPModule) for m in model.modules()) > _OUTSIDE_LAYERS


def shard_tensors(model: Any, mesh: Any) -> None:
    """Divide a model's matrices over a mesh by transformers' own plan for it; norms stay whole on every rank.

    Raises:
        UsageError: the installed transformers has no such code, or no plan for this model.
    """
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        raise UsageError("--sharding tp runs transformers' own plan: install transformers 5.23.") from None
    try:
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    except ValueError as error:
        raise UsageError(f"--sharding tp: {str(error).splitlines()[0]}") from None
    apply_tensor_parallelism(model, mesh, plan)


_OUTSIDE_LAYERS = 4  # embeddings, last norm, head, and the model itself


def _as_transformers_would(model: Any, accelerator: Any) -> None:
    try:
        from transformers.integrations.fsdp import update_fsdp_plugin_peft
    except ImportError:  # transformers 4: a method of the trainer, for the first FSDP only
        return
    update_fsdp_plugin_peft(model, accelerator)


@contextmanager
def gathered_owned(session: FakeSession) -> Iterator[None]:
    """While open, what FSDP2 gathers is known as the parameter it is, and what it stages as communication."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    recorder, book = session.fake_recorder, session.book
    gather, allocate = FSDPParam.alloc_all_gather_outputs, collectives.DefaultAllocMixin.allocate
    reduce = FSDPParamGroup.post_backward

    def claim(tensor: Any, category: Category, detail: str | None, name: str) -> None:
        if address := recorder.address_of(tensor.untyped_storage()):
            book.claim_address(address, category, detail, name)

    def gathered(self: Any) -> None:
        gather(self)
        category = book.category_of(self.sharded_param)
        for tensor in self.all_gather_outputs:
            claim(tensor, category, "unsharded", f"{self._param_fqn} (gathered)")

    def allocated(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = allocate(self, *args, **kwargs)
        if "reduce_scatter_input" not in sys._getframe(1).f_locals:  # what is reduced into becomes the gradients
            claim(made, Category.COMMUNICATION, None, type(self).__name__)
        return made

    def reduced(self: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                claim(whole.grad, Category.GRADIENTS, "unsharded", parameter._param_fqn)
        return reduce(self, *args, **kwargs)

    numbers = {id(torch.cpu.current_stream()): 0}

    def stream() -> int:
        """FSDP2 gathers and reduces on streams of its own, which have pools of their own; numbered as they come."""
        return numbers.setdefault(id(torch.cpu.current_stream()), len(numbers))

    recorder.stream_of = stream
    with patched(
        (FSDPParam, "alloc_all_gather_outputs", gathered),
        (FSDPParamGroup, "post_backward", reduced),
        (collectives.DefaultAllocMixin, "allocate", allocated),
    ):
        yield


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
