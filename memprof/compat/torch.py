"""Declare what memprof uses of torch beside its documented names."""

from __future__ import annotations

from memprof.compat.targets import ASSIGNED, READ, REPLACED, Target

_MEMORY = "torch.cuda.memory"
_DISPATCH = "torch.utils._python_dispatch"
_FAKE = "torch._subclasses.fake_tensor"
_LEAN, _SIMULATED, _TRACE, _CUDA = ("lean",), ("simulate.world",), ("record.trace",), ("record.cuda",)
_TRACED = ("record.trace", "simulate.world")
_WATCHED = ("callback", "run", "attach")

# -- CUDA's memory history -------------------------------------------------------------------------------------------

HISTORY = Target(
    _MEMORY, "_record_memory_history", "(enabled, *, context, stacks, max_entries, **kwargs)", needed_by=_CUDA
)
SNAPSHOT = Target(_MEMORY, "_snapshot", "()", needed_by=_CUDA)
SEGMENTS = Target(
    _MEMORY, "memory_snapshot", "(*, include_traces)", optional_for=_CUDA,
    consequence="block sizes in use cannot be asked for without the whole history",
)  # fmt: skip
HISTORY_ENABLED = Target("torch._C", "_cuda_isHistoryEnabled", needed_by=_CUDA, build="cuda")
OOM_OBSERVER = Target(
    "torch._C", "_cuda_attach_out_of_memory_observer", optional_for=_CUDA, build="cuda",
    consequence="an out-of-memory error that is caught inside the program cannot be seen",
)  # fmt: skip
TAG = Target(
    _MEMORY, "_set_memory_metadata", "(metadata)", optional_for=_CUDA,
    consequence="allocations carry no phase of their own, and phases are known by time alone",
)  # fmt: skip
CURRENT_TAG = Target(
    _MEMORY, "_get_memory_metadata", "()", optional_for=_CUDA,
    consequence="allocations carry no phase of their own, and phases are known by time alone",
)  # fmt: skip
WHEN_CUDA_IS_USED = Target(
    "torch.cuda", "_lazy_call", "(callable)", optional_for=("run",),
    consequence="an out-of-memory error before a model's first forward is not recorded",
)  # fmt: skip
PINNED = Target(
    "torch.cuda", "host_memory_stats", "()", optional_for=_CUDA, consequence="pinned host memory cannot be counted"
)

# -- dispatch modes and stacks ---------------------------------------------------------------------------------------

DISPATCH_MODE = Target(_DISPATCH, "TorchDispatchMode", how=READ, needed_by=_TRACED)
MODE_STACK = Target(_DISPATCH, "_get_current_dispatch_mode_stack", "()", needed_by=("record.trace", "script"))
POP_MODE = Target(_DISPATCH, "_pop_mode", "()", needed_by=_TRACE)
PUSH_MODE = Target(_DISPATCH, "_push_mode", "(mode)", needed_by=_TRACE)
NO_MODES = Target(_DISPATCH, "_disable_current_modes", "()", needed_by=("script",))
SKIP_DYNAMO = Target(
    _DISPATCH, "TorchDispatchMode._should_skip_dynamo", "()", how=REPLACED, optional_for=_SIMULATED,
    consequence="the simulator takes longer",
)  # fmt: skip
PLAIN_DISPATCH = Target("torch._C", "_disabled_torch_dispatch_impl", needed_by=_TRACED)
GATHER_STACK = Target("torch._C", "_profiler.gather_traceback", needed_by=_TRACED)
SYMBOLIZE = Target("torch._C", "_profiler.symbolize_tracebacks", needed_by=_TRACED)
GRAPH_TASK = Target("torch._C", "_current_graph_task_id", needed_by=("record.trace", "simulate.world", "attach"))
SKIP_COMPILER = Target(
    "torch._C", "_dynamo.eval_frame.set_code_exec_strategy", or_else=("_dynamo.eval_frame.skip_code",),
    optional_for=_TRACE, consequence="torch.compile looks into the trace's own code, which costs time",
)  # fmt: skip
FRAME_ACTION = Target(
    "torch._C", "_dynamo.eval_frame._FrameAction", how=READ, or_else=("_dynamo.eval_frame.skip_code",),
    optional_for=_TRACE, consequence="torch.compile looks into the trace's own code, which costs time",
)  # fmt: skip
FRAME_STRATEGY = Target(
    "torch._C", "_dynamo.eval_frame._FrameExecStrategy", how=READ, or_else=("_dynamo.eval_frame.skip_code",),
    optional_for=_TRACE, consequence="torch.compile looks into the trace's own code, which costs time",
)  # fmt: skip
STORAGE_KEY = Target("torch", "UntypedStorage._cdata", how=READ, needed_by=("record.cuda", *_TRACED))
STORAGE_RESIZE = Target("torch", "UntypedStorage.resize_", "(self, size)", how=REPLACED, needed_by=_TRACED)
OPERATOR_SCHEMA = Target("torch", "ops.aten.add.Tensor._schema", how=READ, needed_by=_TRACED)

COMPILED_LAUNCH = Target(
    "torch._inductor.runtime.triton_heuristics", "CachingAutotuner.run", "(self, *args, **kwargs)", how=REPLACED,
    optional_for=("record.cuda",),
    consequence="kernels of torch.compile that an emulated device leaves uncomputed are not named",
)  # fmt: skip

_HOOKED = ("simulate.world", "lean")

# -- hooks -----------------------------------------------------------------------------------------------------------

BEFORE_FORWARD = Target(
    "torch.nn.modules.module", "register_module_forward_pre_hook", "(hook)", needed_by=("record.trace", "run")
)
AFTER_FORWARD = Target(
    "torch.nn.modules.module", "register_module_forward_hook", "(hook, *, always_call)",
    needed_by=("record.trace", "run"),
)  # fmt: skip
BEFORE_HOOKS = Target("torch.nn.modules.module", "Module._forward_pre_hooks", how=ASSIGNED, needed_by=_HOOKED)
AFTER_HOOKS = Target("torch.nn.modules.module", "Module._forward_hooks", how=ASSIGNED, needed_by=_HOOKED)
BEFORE_BACKWARD_HOOKS = Target(
    "torch.nn.modules.module", "Module._backward_pre_hooks", how=ASSIGNED, needed_by=("lean",)
)
AFTER_BACKWARD_HOOKS = Target("torch.nn.modules.module", "Module._backward_hooks", how=ASSIGNED, needed_by=("lean",))
GRADIENT_HOOKS = Target("torch", "Tensor._backward_hooks", how=READ, needed_by=("lean",))
ACCUMULATED_HOOKS = Target("torch", "Tensor._post_accumulate_grad_hooks", how=READ, needed_by=("lean",))
PROFILED = Target("torch.autograd.profiler", "record_function.__enter__", "(self)", how=REPLACED, needed_by=_SIMULATED)
PROFILED_END = Target(
    "torch.autograd.profiler", "record_function.__exit__", "(self, exc_type, exc_value, traceback)", how=REPLACED,
    needed_by=_SIMULATED,
)  # fmt: skip
BEFORE_STEP = Target(
    "torch.optim.optimizer", "register_optimizer_step_pre_hook", "(hook)", needed_by=(*_WATCHED, *_TRACED)
)
AFTER_STEP = Target(
    "torch.optim.optimizer", "register_optimizer_step_post_hook", "(hook)", needed_by=(*_WATCHED, *_TRACED)
)
BACKWARD = Target(
    "torch.autograd", "backward", "(*args, **kwargs)", how=REPLACED, needed_by=_SIMULATED,
    optional_for=("run", "attach"), consequence="phase backward cannot be marked", used_in="torch:Tensor.backward",
)  # fmt: skip
CLIP = Target(
    "torch.nn.utils.clip_grad", "clip_grad_norm_", "(*args, **kwargs)", how=REPLACED, optional_for=("run",),
    consequence="gradient clipping cannot be counted to optimizer_step",
)  # fmt: skip
IS_COMPILING = Target(
    "torch.compiler", "is_compiling", "()", or_else=("torch._utils:is_compiling",), needed_by=_WATCHED
)

# -- the fake world --------------------------------------------------------------------------------------------------

FAKE_TENSOR = Target(_FAKE, "FakeTensor", how=READ, needed_by=("simulate.world", "lean"))
FAKE_CONSTANT = Target(_FAKE, "FakeTensor.constant", how=ASSIGNED, needed_by=_SIMULATED)
FAKE_DEVICE = Target(_FAKE, "FakeTensor.fake_device", how=ASSIGNED, needed_by=_SIMULATED)
FAKE_MODE = Target(_FAKE, "FakeTensorMode", "(*, allow_non_fake_inputs)", needed_by=_SIMULATED)
_SLOWER = "the simulator takes about half as long again"
FAKE_SYMBOLIC = Target(
    "torch", "Tensor._has_symbolic_sizes_strides", how=READ, optional_for=_SIMULATED, consequence=_SLOWER
)
NO_DISPATCH = Target("torch._C", "_DisableTorchDispatch", how=READ, optional_for=_SIMULATED, consequence=_SLOWER)
MAKE_SUBCLASS = Target("torch", "Tensor._make_subclass", how=READ, optional_for=_SIMULATED, consequence=_SLOWER)
NO_DATA_POINTER = Target(
    "torch._C", "_set_throw_on_mutable_data_ptr", how=READ, optional_for=_SIMULATED, consequence=_SLOWER
)
KEYS_OF = Target("torch._C", "_dispatch_key_set", how=READ, optional_for=_SIMULATED, consequence=_SLOWER)
NEEDS_VALUES = Target(_FAKE, "DataDependentOutputException", how=READ, needed_by=_SIMULATED)
NEEDS_SHAPES = Target(_FAKE, "DynamicOutputShapeException", how=READ, needed_by=_SIMULATED)
UNSUPPORTED = Target(_FAKE, "UnsupportedOperatorException", how=READ, needed_by=_SIMULATED)
MODULE_APPLY = Target("torch.nn", "Module._apply", "(self, fn, recurse)", how=REPLACED, needed_by=_SIMULATED)
MODULE_PARAMETERS = Target("torch.nn", "Module._parameters", how=ASSIGNED, needed_by=_SIMULATED)
MODULE_BUFFERS = Target("torch.nn", "Module._buffers", how=ASSIGNED, needed_by=_SIMULATED)
MODULE_TO = Target("torch.nn", "Module.to", "(self, *args, **kwargs)", how=REPLACED, needed_by=("script",))
MODULE_CUDA = Target("torch.nn", "Module.cuda", "(self, *args, **kwargs)", how=REPLACED, needed_by=("script",))
PARSE_TO = Target("torch._C", "_nn._parse_to", needed_by=("script",))
INFERENCE_MODE = Target("torch", "inference_mode", "(mode)", needed_by=_SIMULATED)
ENGINE = Target("torch.autograd.graph", "_engine_run_backward", how=READ, needed_by=_SIMULATED)
SAVED_HOOKS = Target("torch.autograd.graph", "saved_tensors_hooks", "(pack_hook, unpack_hook)", needed_by=_SIMULATED)
SAVE_ON_CPU = Target(
    "torch.autograd.graph", "save_on_cpu", "(pin_memory, device_type)", how=REPLACED, needed_by=("simulate.offloaded",)
)
STORAGE_USES = Target("torch._C", "_storage_Use_Count", needed_by=_SIMULATED)
TENSOR_USES = Target("torch", "Tensor._use_count", how=READ, needed_by=_SIMULATED)
FOREACH_DEVICES = Target(
    "torch.utils._foreach_utils", "_get_foreach_kernels_supported_devices", "()", how=REPLACED, needed_by=_SIMULATED,
    used_in="_device_has_foreach_support",
)  # fmt: skip
FOREACH_DEVICES_IN_OPTIMIZERS = Target(
    "torch.optim.optimizer", "_get_foreach_kernels_supported_devices", "()", how=REPLACED, needed_by=_SIMULATED,
    used_in="_default_to_fused_or_foreach",
)  # fmt: skip
FOREACH_TYPES = Target("torch.optim.optimizer", "_foreach_supported_types", how=READ, needed_by=_SIMULATED)
FOREACH_TYPES_OF_NORMS = Target(
    "torch.utils._foreach_utils", "_foreach_supported_types", how=READ, needed_by=_SIMULATED
)
CONTIGUOUS_STRIDES = Target("torch._prims_common", "make_contiguous_strides_for", "(shape)", needed_by=_SIMULATED)
STEP_IF_FINITE = Target(
    "torch.amp.grad_scaler", "GradScaler._maybe_opt_step", "(self, optimizer, optimizer_state, *args, **kwargs)",
    how=REPLACED, needed_by=_SIMULATED,
)  # fmt: skip
ADAM_STATE = Target(
    "torch.optim.adam", "Adam._init_group", "(self, group, *lists)", how=REPLACED, needed_by=_SIMULATED,
)  # fmt: skip
# AdamW inherits it, until torch._dynamo is imported, which gives every optimizer class one of its own.
ADAMW_STATE = Target(
    "torch.optim.adamw", "AdamW._init_group", "(self, group, *lists)", how=REPLACED, needed_by=_SIMULATED,
)  # fmt: skip
RMSPROP_STATE = Target(
    "torch.optim.rmsprop", "RMSprop._init_group", "(self, group, *lists)", how=REPLACED, needed_by=_SIMULATED,
)  # fmt: skip
LOADER_ITERATOR = Target(
    "torch.utils.data.dataloader", "_BaseDataLoaderIter.__init__", "(self, loader)", how=REPLACED, needed_by=_SIMULATED,
)  # fmt: skip
EXCLUDE_KEYS = Target("torch._C", "_ExcludeDispatchKeyGuard", needed_by=_SIMULATED)
KEY_SET = Target("torch._C", "DispatchKeySet", how=READ, needed_by=_SIMULATED)
AUTOCAST_KEY = Target("torch._C", "DispatchKey.AutocastCPU", how=READ, needed_by=_SIMULATED)
LIBRARY_DESTROY = Target("torch.library", "Library._destroy", "(self)", needed_by=_SIMULATED)
ATTENTION = Target("torch.nn.functional", "scaled_dot_product_attention", how=READ, needed_by=_SIMULATED)
DROPOUT = Target("torch.nn.functional", "dropout", "(input, p, training, inplace)", how=REPLACED, needed_by=_SIMULATED)
SAFE_SOFTMAX = Target("torch", "ops.aten._safe_softmax.default", "(self, dim)", needed_by=_SIMULATED)
SOFTMAX_BACKWARD = Target("torch", "ops.aten._softmax_backward_data.default", how=READ, needed_by=_SIMULATED)
FOREACH_NORM = Target("torch", "ops.aten._foreach_norm.Scalar", how=READ, needed_by=_SIMULATED)
LOCAL_SCALAR = Target("torch", "ops.aten._local_scalar_dense.default", "(self)", needed_by=_SIMULATED)
UNSAFE_VIEW = Target("torch", "ops.aten._unsafe_view.default", "(self, size)", needed_by=_SIMULATED)

# -- attention's kernels ---------------------------------------------------------------------------------------------

FLASH = Target(
    "torch", "ops.aten._scaled_dot_product_flash_attention.default",
    "(query, key, value, dropout_p, is_causal, *, scale)", needed_by=("lean", "simulate.world"),
)  # fmt: skip
FLASH_BACKWARD = Target(
    "torch", "ops.aten._scaled_dot_product_flash_attention_backward.default",
    "(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, "
    "philox_seed, philox_offset, *, scale)", needed_by=("lean", "simulate.world"),
)  # fmt: skip
EFFICIENT = Target(
    "torch", "ops.aten._scaled_dot_product_efficient_attention.default",
    "(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, *, scale)",
    needed_by=("lean", "simulate.world"),
)  # fmt: skip
EFFICIENT_BACKWARD = Target(
    "torch", "ops.aten._scaled_dot_product_efficient_attention_backward.default",
    "(grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, "
    "grad_input_mask, is_causal, *, scale)", needed_by=("lean", "simulate.world"),
)  # fmt: skip
FLASH_ON_CPU = Target(
    "torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
    "(query, key, value, dropout_p, is_causal, *, scale)", needed_by=_LEAN,
)  # fmt: skip
FLASH_ON_CPU_BACKWARD = Target(
    "torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    "(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, scale)", needed_by=_LEAN,
)  # fmt: skip

# What selective checkpointing keeps the output of, beside the kernels above.
_AGAIN = "selective checkpointing computes attention again where this kernel runs it"
CUDNN = Target("torch", "ops.aten._scaled_dot_product_cudnn_attention.default", optional_for=_LEAN, consequence=_AGAIN)
FUSED = Target(
    "torch", "ops.aten._scaled_dot_product_fused_attention_overrideable.default", optional_for=_LEAN,
    consequence=_AGAIN,
)  # fmt: skip
FLASH_FORWARD = Target("torch", "ops.aten._flash_attention_forward.default", optional_for=_LEAN, consequence=_AGAIN)
EFFICIENT_FORWARD = Target(
    "torch", "ops.aten._efficient_attention_forward.default", optional_for=_LEAN, consequence=_AGAIN
)
