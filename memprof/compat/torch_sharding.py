"""Declare what memprof uses of torch's sharded and distributed training."""

from __future__ import annotations

from memprof.compat.targets import ASSIGNED, LOCAL, READ, REPLACED, Target

_FLAT = "torch.distributed.fsdp._flat_param"
_FULLY = "torch.distributed.fsdp._fully_shard"
_FSDP2 = ("simulate.fsdp2",)
_WATCHED = ("callback", "run", "attach")
_SHARDS = "shards and gathered parameters of {} cannot be told apart"
_FSDP1_WORDS, _FSDP2_WORDS = _SHARDS.format("FSDP"), _SHARDS.format("FSDP2")

# -- process groups --------------------------------------------------------------------------------------------------

FAKE_STORE = Target(
    "torch.testing._internal.distributed.fake_pg", "FakeStore", how=READ, needed_by=("simulate.fsdp2", "simulate.tp")
)
GROUPS = Target(
    "torch.distributed.distributed_c10d", "_world.pg_map", how=READ, optional_for=_WATCHED,
    consequence="NCCL's communicators cannot be counted",
)  # fmt: skip
STORE = Target(
    "torch.distributed.distributed_c10d", "_get_default_store", "()", optional_for=_WATCHED,
    consequence="ranks cannot tell each other where they are",
)  # fmt: skip
DDP_BUCKETS = Target(
    "torch.nn.parallel", "DistributedDataParallel._get_ddp_logging_data", "(self)", optional_for=_WATCHED,
    consequence="gradient buckets of DistributedDataParallel cannot be known",
)  # fmt: skip

# -- DTensor and FSDP2 -----------------------------------------------------------------------------------------------

PLANNING = Target(
    "torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_non_cached",
    "(self, *args, **kwargs)", how=REPLACED, needed_by=("simulate.fsdp2", "simulate.tp"),
    used_in="ShardingPropagator._propagate_tensor_meta",
)  # fmt: skip
STRIDED_FLAG = Target(
    "torch.distributed.tensor._sharding_prop", "_propagate_use_strided_shard_flag", "(op_strategy, op_schema)",
    how=REPLACED, optional_for=("simulate.fsdp2", "simulate.tp"), consequence="sharded steps take longer to simulate",
    used_in="ShardingPropagator.propagate_op_sharding_non_cached",
)  # fmt: skip
STRIDED_SHARD = Target(
    "torch.distributed.tensor.placement_types", "_StridedShard", how=READ,
    optional_for=("simulate.fsdp2", "simulate.tp"), consequence="sharded steps take longer to simulate",
)  # fmt: skip
LOCAL_TENSOR = Target(
    "torch.distributed.tensor", "DTensor._local_tensor", how=ASSIGNED, needed_by=("simulate.fsdp2", "simulate.tp"),
    optional_for=_WATCHED, consequence="shards that are views of whole parameters cannot be noticed",
)  # fmt: skip
FSDP_STATE = Target(
    "torch.distributed.fsdp", "FSDPModule._get_fsdp_state", "(self)", optional_for=_WATCHED, consequence=_FSDP2_WORDS
)
FSDP_GROUPS = Target(
    f"{_FULLY}._fsdp_state", "FSDPState._fsdp_param_groups", how=ASSIGNED, optional_for=_WATCHED,
    or_else=("FSDPState._fsdp_param_group",), consequence=_FSDP2_WORDS,
)  # fmt: skip
FSDP_PARAMETERS = Target(
    f"{_FULLY}._fsdp_param_group", "FSDPParamGroup.fsdp_params", how=ASSIGNED, needed_by=_FSDP2,
    optional_for=_WATCHED, consequence=_FSDP2_WORDS,
)  # fmt: skip
GATHERED = Target(
    f"{_FULLY}._fsdp_param", "FSDPParam.all_gather_outputs", how=ASSIGNED, needed_by=_FSDP2, optional_for=_WATCHED,
    consequence=_FSDP2_WORDS,
)  # fmt: skip
UNSHARDED = Target(
    f"{_FULLY}._fsdp_param", "FSDPParam._unsharded_param", how=ASSIGNED, needed_by=_FSDP2, optional_for=_WATCHED,
    consequence="whole gradients of FSDP2 cannot be known",
)  # fmt: skip
PARAMETER_NAME = Target(
    f"{_FULLY}._fsdp_param", "FSDPParam._param_fqn", how=ASSIGNED, needed_by=_FSDP2, optional_for=_WATCHED,
    consequence="parameters that FSDP2 gathers have no names",
)  # fmt: skip
SHARDED_PARAMETER = Target(f"{_FULLY}._fsdp_param", "FSDPParam.sharded_param", how=ASSIGNED, needed_by=_FSDP2)
GATHER = Target(
    f"{_FULLY}._fsdp_param", "FSDPParam.alloc_all_gather_outputs", "(self)", how=REPLACED, needed_by=_FSDP2,
    used_in=f"{_FULLY}._fsdp_collectives:_default_all_gather_output_fn or foreach_all_gather_copy_out",
)  # fmt: skip
REDUCE = Target(
    f"{_FULLY}._fsdp_param_group", "FSDPParamGroup.post_backward", "(self, *args, **kwargs)", how=REPLACED,
    needed_by=_FSDP2, used_in="RegisterPostBackwardFunction.backward",
)  # fmt: skip
ALLOCATE = Target(
    f"{_FULLY}._fsdp_collectives", "DefaultAllocMixin.allocate", "(self, *args, **kwargs)", how=REPLACED,
    needed_by=_FSDP2, used_in="foreach_all_gather",
)  # fmt: skip
# Told apart from what is gathered by this name of its caller's.
REDUCE_INPUT = Target(
    f"{_FULLY}._fsdp_collectives", "reduce_scatter_input", how=LOCAL, used_in="foreach_reduce", needed_by=_FSDP2
)

# -- FSDP1 -----------------------------------------------------------------------------------------------------------

HANDLE = Target(
    "torch.distributed.fsdp._common_utils", "_FSDPState._handle", how=ASSIGNED, optional_for=_WATCHED,
    consequence=_FSDP1_WORDS,
)  # fmt: skip
FLAT_PARAMETER = Target(
    _FLAT, "FlatParamHandle.flat_param", how=ASSIGNED, optional_for=_WATCHED, consequence=_FSDP1_WORDS
)
IS_FLAT = Target(_FLAT, "FlatParameter._is_flat_param", how=ASSIGNED, optional_for=_WATCHED, consequence=_FSDP1_WORDS)
LOCAL_SHARD = Target(_FLAT, "FlatParameter._local_shard", how=ASSIGNED, optional_for=_WATCHED, consequence=_FSDP1_WORDS)
WHOLE_PADDED = Target(
    _FLAT, "FlatParameter._full_param_padded", how=ASSIGNED, optional_for=_WATCHED, consequence=_FSDP1_WORDS
)
WHOLE_PRECISE = Target(
    _FLAT, "FlatParameter._full_prec_full_param_padded", how=ASSIGNED, optional_for=_WATCHED, consequence=_FSDP1_WORDS
)
LOW_PRECISION = Target(
    _FLAT, "FlatParameter._mp_shard", how=ASSIGNED, optional_for=_WATCHED,
    consequence="FSDP's copies in low precision cannot be told apart",
)  # fmt: skip
SAVED_GRADIENT = Target(
    _FLAT, "FlatParameter._saved_grad_shard", how=ASSIGNED, optional_for=_WATCHED,
    consequence="gradients that FSDP keeps cannot be told apart",
)  # fmt: skip
HOST_GRADIENT = Target(
    _FLAT, "FlatParameter._cpu_grad", how=ASSIGNED, optional_for=_WATCHED,
    consequence="gradients that FSDP keeps on the host cannot be told apart",
)  # fmt: skip
FLAT_NAMES = Target(
    _FLAT, "FlatParameter._fqns", how=ASSIGNED, optional_for=_WATCHED,
    consequence="FSDP's flat parameters have no names",
)  # fmt: skip
