"""Find what the engines of sharded training hold by the objects they keep it in.

FSDP2, FSDP1, DistributedDataParallel and DeepSpeed's ZeRO: their shards and flat buffers are parameters, gradients or
optimizer state like any other, what they gather and reduce through is staging. Read only; nothing is called that
computes or communicates. Attributes an engine's release does not have are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memprof.compat import torch_sharding as names
from memprof.compat.optional_packages import ZERO_OLDER_BUCKETS
from memprof.recording.storages import storage_key
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from torch import nn

SHARDED, UNSHARDED = "sharded", "unsharded"

Found = Iterator[tuple[Any, Category, "str | None", str]]  # tensor, category, detail, name

# Attributes of DeepSpeed's optimizers: stages 1 and 2, stage 3, and the bf16 optimizer.
_ZERO = {
    "bit16_groups_flat": (Category.WEIGHTS, None),
    "bf16_groups_flat": (Category.WEIGHTS, None),
    "fp16_partitioned_groups_flat": (Category.WEIGHTS, SHARDED),
    "param_buffer_of_bit16_for_cpu_offload_groups": (Category.COMMUNICATION, None),
    "single_partition_of_fp32_groups": (Category.OPTIMIZER_STATE, None),
    "fp32_partitioned_groups_flat": (Category.OPTIMIZER_STATE, None),
    "fp32_groups_flat_partition": (Category.OPTIMIZER_STATE, None),
    "averaged_gradients": (Category.GRADIENTS, None),
    "grad_partitions_flat_buffer": (Category.GRADIENTS, None),
    "fp32_groups_gradients_flat": (Category.GRADIENTS, None),
    "ipg_buckets": (Category.COMMUNICATION, None),
    **dict.fromkeys(ZERO_OLDER_BUCKETS, (Category.COMMUNICATION, None)),
}
_DEPTH = 4


def is_sharded(tensor: Any) -> bool:
    """Tell whether this rank holds only its part of a parameter."""
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        return any(getattr(p, "is_shard", bool)() for p in placements)
    return bool(names.IS_FLAT.of(tensor) and names.WHOLE_PADDED.of(tensor) is not None)


def has_engine(model: nn.Module) -> bool:
    """Tell whether FSDP or ZeRO-3 holds (a part of) this model."""
    modules = list(model.modules())
    fsdp = any(names.HANDLE.of(m) is not None or names.FSDP_STATE.of(m) is not None for m in modules)
    return fsdp or any(hasattr(p, "ds_tensor") for p in model.parameters())


def shards_and_storages(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of a model's sharded parameters on this rank, and of their storages, each once: a shard can be a
    view of the whole parameter, and then nothing is saved."""
    own, held = 0, {}
    for parameter in model.parameters():
        local = names.LOCAL_TENSOR.of(parameter)
        if local is not None and is_sharded(parameter):
            storage = local.untyped_storage()
            own += local.numel() * local.element_size()
            held[storage_key(storage)] = storage.nbytes()
    return own, sum(held.values())


def engine_tensors(model: nn.Module) -> Found:
    """Yield what FSDP1 and ZeRO-3 keep beside a model's own parameters, and what FSDP has gathered at this moment."""
    for module in model.modules():
        flat = _flat_of(module)
        if flat is not None:
            yield from _flat_parameter(flat)
    for name, parameter in model.named_parameters():
        partition = getattr(parameter, "ds_tensor", None)
        if partition is not None:
            yield partition, Category.WEIGHTS, SHARDED, name
    for shard in _fsdp2_parameters(model):
        for gathered in names.GATHERED.of(shard, ()):
            yield gathered, Category.WEIGHTS, UNSHARDED, _name(shard)


def _flat_parameter(flat: Any) -> Found:
    """Yield FSDP1: one flat parameter, its shard, and what it is gathered into."""
    name = _flat_name(flat)
    shard = names.LOCAL_SHARD.of(flat)
    whole = names.WHOLE_PADDED.of(flat)
    if shard is not None:
        # Without a sharded size the flat parameter is the whole one (NO_SHARD).
        yield shard, Category.WEIGHTS, SHARDED if whole is not None else None, name
    for target in (names.WHOLE_PADDED, names.WHOLE_PRECISE):
        if (gathered := target.of(flat)) is not None:
            yield gathered, Category.WEIGHTS, UNSHARDED, name
    if (low := names.LOW_PRECISION.of(flat)) is not None:
        yield low, Category.WEIGHT_CASTS, None, name
    for grad in (names.SAVED_GRADIENT.of(flat), names.HOST_GRADIENT.of(flat), flat.grad):
        if grad is not None:
            yield grad, Category.GRADIENTS, None, name


def _flat_of(module: Any) -> Any:
    """Return the flat parameter FSDP1 keeps for a module; None where it keeps none."""
    return names.FLAT_PARAMETER.of(names.HANDLE.of(module))


def _flat_name(flat: Any) -> str:
    parts = list(names.FLAT_NAMES.of(flat) or ())
    return ", ".join(parts[:2]) + (f" and {len(parts) - 2} more" if len(parts) > 2 else "") or "flat parameter"


def unsharded_parameters(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield FSDP's whole parameters, once there are any; their gradients are whole too until they are reduced."""
    for module in model.modules():
        flat = _flat_of(module)
        if flat is not None and flat.requires_grad and is_sharded(flat):
            yield flat, _flat_name(flat)
    for shard in _fsdp2_parameters(model):
        parameter = names.UNSHARDED.of(shard)
        if parameter is not None and parameter.requires_grad:
            yield parameter, _name(shard)


def _fsdp2_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        state_of = names.FSDP_STATE.of(module)
        if state_of is None:
            continue
        state = state_of()
        several, one = names.FSDP_GROUPS.names
        groups = getattr(state, several, None)
        if groups is None:  # torch before 2.12 has one
            groups = [getattr(state, one, None)]
        for group in groups:
            yield from names.FSDP_PARAMETERS.of(group, ())


def _name(shard: Any) -> str:
    return str(names.PARAMETER_NAME.of(shard) or "parameter")


def zero_tensors(optimizer: Any) -> Found:
    """Yield what an optimizer of DeepSpeed's ZeRO keeps: flat parameters, partitions, master weights, buckets."""
    for attribute, (category, detail) in _ZERO.items():
        for tensor in _tensors(getattr(optimizer, attribute, None)):
            yield tensor, category, detail, attribute.rpartition("__")[2] or attribute


def _tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEPTH:
        if isinstance(value, Mapping):
            value = list(value.values())
        elif hasattr(value, "buffer"):  # an IPGBucket; of the gradients in it, views of the buffer, nothing is new
            value = value.buffer
        if isinstance(value, (list, tuple)):
            for item in value:
                yield from _tensors(item, depth + 1)
        elif isinstance(value, torch.Tensor):
            yield value


def bucket_bytes(wrapper: Any) -> list[int]:
    """Return the sizes of DistributedDataParallel's gradient buckets, as its reducer states them.

    They live as long as the wrapper, and no Python object stands for them. Empty where ``.grad`` is a view of a bucket:
    there the buckets are the gradients.
    """
    logged: Callable[[], dict[str, Any]] | None = names.DDP_BUCKETS.of(wrapper)
    if logged is None or getattr(wrapper, "gradient_as_bucket_view", False):
        return []
    said = logged()
    sizes = said.get("rebuilt_bucket_sizes") or said.get("bucket_sizes") or ""
    return [int(n) for part in str(sizes).split(",") if (n := part.strip()).isdigit()]
