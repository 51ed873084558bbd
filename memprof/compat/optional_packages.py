"""Declare what memprof uses of packages that a run may do without, and of Python itself."""

from __future__ import annotations

from memprof.compat.targets import Target, assigned, optional, read, replaced

_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2"
_ZERO3 = "deepspeed.runtime.zero.stage3"
_BF16 = "deepspeed.runtime.bf16_optimizer"
_WATCHED = ("callback", "run", "attach")

# -- Python ----------------------------------------------------------------------------------------------------------

MODULE_DETAILS = Target("runpy", "_get_module_details", "(mod_name)", needed_by=("run",))
MAIN_DETAILS = Target("runpy", "_get_main_module_details", "()", needed_by=("run",))
_STARTED = optional("operations on threads that start during the recording are not recorded", ("record.trace",))
# What `threading.Thread.start` calls, however a program has saved or overridden that; the older name until Python 3.12.
THREAD_START = read("threading", "_start_joinable_thread", or_else=("_start_new_thread",), **_STARTED)
RAW_THREAD_START = read("_thread", "start_new_thread", **_STARTED)
THREAD_TARGET = assigned(
    "threading", "Thread._target",
    **optional("threads of trackers are named among those whose operations are not recorded", ("record.trace",)),
)  # fmt: skip

# -- hubs, for a script that is simulated ----------------------------------------------------------------------------

HUB_OFFLINE = read("huggingface_hub.constants", "HF_HUB_OFFLINE", needed_by=("script",))
DATA_OFFLINE = read("datasets.config", "HF_HUB_OFFLINE", needed_by=("script",))
LOAD_DATASET = replaced("datasets", "load_dataset", "(*args, **kwargs)", needed_by=("script",))
LOAD_FROM_DISK = replaced("datasets", "load_from_disk", "(*args, **kwargs)", needed_by=("script",))

# -- DeepSpeed -------------------------------------------------------------------------------------------------------

#: Attribute of a ZeRO optimizer -> its class. Stages 1 and 2, stage 3, the bf16 optimizer.
ZERO_ATTRIBUTES = {
    "bit16_groups_flat": (_ZERO12, "DeepSpeedZeroOptimizer"),
    "bf16_groups_flat": (_BF16, "BF16_Optimizer"),
    "fp16_partitioned_groups_flat": (_ZERO3, "DeepSpeedZeroOptimizer_Stage3"),
    "param_buffer_of_bit16_for_cpu_offload_groups": (_ZERO12, "DeepSpeedZeroOptimizer"),
    "single_partition_of_fp32_groups": (_ZERO12, "DeepSpeedZeroOptimizer"),
    "fp32_partitioned_groups_flat": (_ZERO3, "DeepSpeedZeroOptimizer_Stage3"),
    "fp32_groups_flat_partition": (_BF16, "BF16_Optimizer"),
    "averaged_gradients": (_ZERO12, "DeepSpeedZeroOptimizer"),
    "grad_partitions_flat_buffer": (_ZERO3, "DeepSpeedZeroOptimizer_Stage3"),
    "fp32_groups_gradients_flat": (_BF16, "BF16_Optimizer"),
    "ipg_buckets": (_ZERO12, "DeepSpeedZeroOptimizer"),
}
#: Stage 3's gradient bucket, of older releases, by its mangled name.
ZERO_OLDER_BUCKETS = ("ipg_buffer", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer")

#: One for each attribute; DeepSpeed's tensors are known by these names and by nothing else.
ZERO_TARGETS = {
    name: assigned(
        module, f"{kind}.{name}", optional_for=_WATCHED,
        or_else=tuple(f"{kind}.{older}" for older in ZERO_OLDER_BUCKETS if name == "ipg_buckets"),
        consequence="some of DeepSpeed ZeRO's buffers cannot be distinguished",
    )
    for name, (module, kind) in ZERO_ATTRIBUTES.items()
}  # fmt: skip

# -- others ----------------------------------------------------------------------------------------------------------

LIGER_LOSS = Target(
    "liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss",
    "(*, beta, compiled, use_ref_model, loss_type, max_completion_length, temperature, **kwargs)",
    needed_by=("simulate.liger",),
)  # fmt: skip
QUANT_STATE = read(
    "bitsandbytes.functional", "QuantState", optional_for=_WATCHED,
    consequence="scales and code books of 4-bit weights cannot be known",
)  # fmt: skip

# flash-attn registers its kernels with torch; they are there once it has been imported.
_FLASH = "flash_attn.flash_attn_interface"
_FLASH_AGAIN = "selective checkpointing computes flash-attn's attention again"
FLASH_ATTN = Target(
    _FLASH, "torch.ops.flash_attn._flash_attn_forward.default", optional_for=("lean",), consequence=_FLASH_AGAIN
)
FLASH_ATTN_PACKED = Target(
    _FLASH, "torch.ops.flash_attn._flash_attn_varlen_forward.default", optional_for=("lean",), consequence=_FLASH_AGAIN
)

# -- vLLM ------------------------------------------------------------------------------------------------------------

#: The allocator behind sleep mode; its ``instance`` knows which pages it has given back.
ENGINE_POOL = read(
    "vllm.device_allocator.cumem", "CuMemAllocator", optional_for=_WATCHED,
    consequence="what vLLM's sleeping engine gave back is not known",
)  # fmt: skip
