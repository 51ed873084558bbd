"""Declare what memprof uses of torch's sharded and distributed training."""

from __future__ import annotations

from memprof.compat.targets import Target, assigned, local, optional, read, replaced

_FLAT = "torch.distributed.fsdp._flat_param"
_FULLY = "torch.distributed.fsdp._fully_shard"
_FSDP2 = ("simulate.fsdp2",)
_WATCHED = ("callback", "run", "attach")
_SHARDS1, _SHARDS2 = (
    optional(f"shards and gathered parameters of {of} cannot be told apart", _WATCHED) for of in ("FSDP", "FSDP2")
)
_FASTER = optional("sharded steps take longer to simulate", ("simulate.fsdp2", "simulate.tp"))

# -- process groups --------------------------------------------------------------------------------------------------

FAKE_STORE = read(
    "torch.testing._internal.distributed.fake_pg", "FakeStore", needed_by=("simulate.fsdp2", "simulate.tp")
)
GROUPS = read(
    "torch.distributed.distributed_c10d", "_world.pg_map", optional_for=_WATCHED,
    consequence="NCCL's communicators cannot be counted",
)  # fmt: skip
STORE = Target(
    "torch.distributed.distributed_c10d", "_get_default_store", "()", optional_for=_WATCHED,
    consequence="ranks cannot report their positions to each other",
)  # fmt: skip
DDP_BUCKETS = Target(
    "torch.nn.parallel", "DistributedDataParallel._get_ddp_logging_data", "(self)", optional_for=_WATCHED,
    consequence="gradient buckets of DistributedDataParallel cannot be known",
)  # fmt: skip

# -- DTensor and FSDP2 -----------------------------------------------------------------------------------------------

PLANNING = replaced(
    "torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_non_cached",
    "(self, *args, **kwargs)", needed_by=("simulate.fsdp2", "simulate.tp"),
    used_in="ShardingPropagator._propagate_tensor_meta",
)  # fmt: skip
STRIDED_FLAG = replaced(
    "torch.distributed.tensor._sharding_prop", "_propagate_use_strided_shard_flag", "(op_strategy, op_schema)",
    used_in="ShardingPropagator.propagate_op_sharding_non_cached", **_FASTER,
)  # fmt: skip
STRIDED_SHARD = read("torch.distributed.tensor.placement_types", "_StridedShard", **_FASTER)
LOCAL_TENSOR = assigned(
    "torch.distributed.tensor", "DTensor._local_tensor", needed_by=("simulate.fsdp2", "simulate.tp"),
    optional_for=_WATCHED, consequence="shards that are views of whole parameters cannot be noticed",
)  # fmt: skip
FSDP_STATE = Target("torch.distributed.fsdp", "FSDPModule._get_fsdp_state", "(self)", **_SHARDS2)
FSDP_GROUPS = assigned(
    f"{_FULLY}._fsdp_state", "FSDPState._fsdp_param_groups", or_else=("FSDPState._fsdp_param_group",), **_SHARDS2
)
FSDP_PARAMETERS = assigned(f"{_FULLY}._fsdp_param_group", "FSDPParamGroup.fsdp_params", needed_by=_FSDP2, **_SHARDS2)
GATHERED = assigned(f"{_FULLY}._fsdp_param", "FSDPParam.all_gather_outputs", needed_by=_FSDP2, **_SHARDS2)
UNSHARDED = assigned(
    f"{_FULLY}._fsdp_param", "FSDPParam._unsharded_param", needed_by=_FSDP2, optional_for=_WATCHED,
    consequence="whole gradients of FSDP2 cannot be known",
)  # fmt: skip
PARAMETER_NAME = assigned(
    f"{_FULLY}._fsdp_param", "FSDPParam._param_fqn", needed_by=_FSDP2, optional_for=_WATCHED,
    consequence="parameters that FSDP2 gathers have no names",
)  # fmt: skip
SHARDED_PARAMETER = assigned(f"{_FULLY}._fsdp_param", "FSDPParam.sharded_param", needed_by=_FSDP2)
GATHER = replaced(
    f"{_FULLY}._fsdp_param", "FSDPParam.alloc_all_gather_outputs", "(self)", needed_by=_FSDP2,
    used_in=f"{_FULLY}._fsdp_collectives:_default_all_gather_output_fn or foreach_all_gather_copy_out",
)  # fmt: skip
REDUCE = replaced(
    f"{_FULLY}._fsdp_param_group", "FSDPParamGroup.post_backward", "(self, *args, **kwargs)", needed_by=_FSDP2,
    used_in="RegisterPostBackwardFunction.backward",
)  # fmt: skip
ALLOCATE = replaced(
    f"{_FULLY}._fsdp_collectives", "DefaultAllocMixin.allocate", "(self, *args, **kwargs)", needed_by=_FSDP2,
    used_in="foreach_all_gather",
)  # fmt: skip
# Told apart from what is gathered by this name of its caller's.
REDUCE_INPUT = local(f"{_FULLY}._fsdp_collectives", "reduce_scatter_input", used_in="foreach_reduce", needed_by=_FSDP2)

# -- FSDP1 -----------------------------------------------------------------------------------------------------------

HANDLE = assigned("torch.distributed.fsdp._common_utils", "_FSDPState._handle", **_SHARDS1)
FLAT_PARAMETER = assigned(_FLAT, "FlatParamHandle.flat_param", **_SHARDS1)
IS_FLAT = assigned(_FLAT, "FlatParameter._is_flat_param", **_SHARDS1)
LOCAL_SHARD = assigned(_FLAT, "FlatParameter._local_shard", **_SHARDS1)
WHOLE_PADDED = assigned(_FLAT, "FlatParameter._full_param_padded", **_SHARDS1)
WHOLE_PRECISE = assigned(_FLAT, "FlatParameter._full_prec_full_param_padded", **_SHARDS1)
LOW_PRECISION = assigned(
    _FLAT, "FlatParameter._mp_shard", optional_for=_WATCHED,
    consequence="FSDP's copies in low precision cannot be told apart",
)  # fmt: skip
SAVED_GRADIENT = assigned(
    _FLAT, "FlatParameter._saved_grad_shard", optional_for=_WATCHED,
    consequence="gradients that FSDP shards cannot be distinguished",
)  # fmt: skip
HOST_GRADIENT = assigned(
    _FLAT, "FlatParameter._cpu_grad", optional_for=_WATCHED,
    consequence="gradients that FSDP offloads cannot be distinguished",
)  # fmt: skip
FLAT_NAMES = assigned(
    _FLAT, "FlatParameter._fqns", optional_for=_WATCHED, consequence="FSDP's flat parameters have no names"
)
