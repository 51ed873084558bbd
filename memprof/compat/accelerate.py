"""Declare what memprof uses of accelerate."""

from __future__ import annotations

from memprof.compat.targets import Target, assigned, optional, read, replaced

_ACCELERATOR = "accelerate.accelerator"
_STATE = "accelerate.state"
_STEP = optional("phase optimizer_step cannot be marked")

BACKWARD = replaced(
    _ACCELERATOR, "Accelerator.backward", "(self, loss, **kwargs)", needed_by=("lean", "simulate"),
    optional_for=("callback",), consequence="phase backward cannot be marked",
    used_in="transformers.trainer:Trainer.training_step",
)  # fmt: skip
# Set where DeepSpeed is on; its ``engine.step`` is the optimizer's step, and runs inside ``Accelerator.backward``.
DEEPSPEED_ENGINE = assigned(
    _ACCELERATOR, "Accelerator.deepspeed_engine_wrapped", optional_for=("callback",),
    consequence="with DeepSpeed, the optimizer's step cannot be told from the backward it runs in",
)  # fmt: skip
GRADIENT_STATE = assigned(_ACCELERATOR, "Accelerator.gradient_state", needed_by=("lean", "simulate"), **_STEP)
SYNC_GRADIENTS = assigned(_STATE, "GradientState.sync_gradients", needed_by=("lean", "simulate"), **_STEP)
SET_SYNC_GRADIENTS = Target(
    _STATE, "GradientState._set_sync_gradients", "(self, sync_gradients)", needed_by=("lean", "rehearse")
)
_TRLS_LOSS = "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"
GATHER = replaced(_ACCELERATOR, "Accelerator.gather", "(self, tensor)", needed_by=("lean",), used_in=_TRLS_LOSS)
GATHER_METRICS = replaced(
    _ACCELERATOR, "Accelerator.gather_for_metrics", "(self, _, **kwargs)", needed_by=("lean",), used_in=_TRLS_LOSS
)
REDUCE = replaced(
    _ACCELERATOR, "Accelerator.reduce", "(self, tensor, reduction, scale)", needed_by=("lean",), used_in=_TRLS_LOSS
)
UNWRAP = Target(_ACCELERATOR, "Accelerator.unwrap_model", "(self, model)", needed_by=("lean", "simulate"))
NO_SYNC = Target(_ACCELERATOR, "Accelerator.no_sync", "(self, model)", needed_by=("rehearse",))
NATIVE_AMP = assigned(_ACCELERATOR, "Accelerator.native_amp", needed_by=("simulate",))
SCALER = assigned(_ACCELERATOR, "Accelerator.scaler", needed_by=("lean", "rehearse", "simulate"))
BROADCAST = Target("accelerate.utils", "broadcast_object_list", "(object_list)", needed_by=("budget",))
CLEAR_CACHE = Target("accelerate.utils.memory", "clear_device_cache", "()", needed_by=("lean",))
WRAPPED_OPTIMIZER = assigned(
    "accelerate.optimizer", "AcceleratedOptimizer.optimizer", needed_by=("rehearse", "simulate"),
    optional_for=("callback", "attach"),
    consequence="optimizer state cannot be known before the optimizer's first step",
)  # fmt: skip

# One state a process, which a simulation saves and puts back.
PARTIAL_STATE = read(_STATE, "PartialState._shared_state", needed_by=("simulate",))
ACCELERATOR_STATE = read(_STATE, "AcceleratorState._shared_state", needed_by=("simulate",))
SHARED_GRADIENT_STATE = read(_STATE, "GradientState._shared_state", needed_by=("simulate",))

FSDP_PLUGIN = Target(
    "accelerate.utils", "FullyShardedDataParallelPlugin",
    "(*, fsdp_version, reshard_after_forward, auto_wrap_policy, cpu_ram_efficient_loading, **kwargs)",
    needed_by=("simulate.fsdp2",),
)  # fmt: skip
FSDP_PRECISION = Target(
    "accelerate.utils", "FullyShardedDataParallelPlugin.set_mixed_precision", "(self, mixed_precision)",
    needed_by=("simulate.fsdp2",),
)  # fmt: skip
FSDP_PREPARE = Target(
    "accelerate.utils.fsdp_utils", "fsdp2_prepare_model", "(accelerator, model)", needed_by=("simulate.fsdp2",)
)
