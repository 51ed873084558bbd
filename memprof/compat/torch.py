"""Declare what memprof uses of torch beside its documented names."""

from __future__ import annotations

from memprof.compat.targets import Target, assigned, optional, read, replaced

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
# What `_record_memory_history` calls, however it was imported.
_SWITCHED = {
    **optional("a history that the program turns on during memprof's recording is stopped with it", _CUDA),
    "build": "cuda",
}
HISTORY_SWITCH = read("torch._C", "_cuda_record_memory_history", **_SWITCHED)
OLD_HISTORY_SWITCH = read("torch._C", "_cuda_record_memory_history_legacy", **_SWITCHED)
# What every way to reset the peak counters calls.
_RESET = {
    **optional("peaks of phases in which the program resets torch's peak counters are those since then", _CUDA),
    "build": "cuda",
}
PEAK_RESET = read("torch._C", "_cuda_resetPeakMemoryStats", **_RESET)
OTHER_PEAK_RESET = read("torch._C", "_accelerator_resetPeakStats", **_RESET)
OOM_OBSERVER = Target(
    "torch._C", "_cuda_attach_out_of_memory_observer", optional_for=_CUDA, build="cuda",
    consequence="an out-of-memory error that is caught inside the program cannot be seen",
)  # fmt: skip
_TAGGED = optional("allocations carry no phase of their own, and phases are known by time alone", _CUDA)
TAG = Target(_MEMORY, "_set_memory_metadata", "(metadata)", **_TAGGED)
CURRENT_TAG = Target(_MEMORY, "_get_memory_metadata", "()", **_TAGGED)
WHEN_CUDA_IS_USED = Target(
    "torch.cuda", "_lazy_call", "(callable)", optional_for=("run",),
    consequence="an out-of-memory error before a model's first forward is not recorded",
)  # fmt: skip
PINNED = Target(
    "torch.cuda", "host_memory_stats", "()", optional_for=_CUDA, consequence="pinned host memory cannot be counted"
)

# -- dispatch modes and stacks ---------------------------------------------------------------------------------------

DISPATCH_MODE = read(_DISPATCH, "TorchDispatchMode", needed_by=_TRACED)
MODE_STACK = Target(_DISPATCH, "_get_current_dispatch_mode_stack", "()", needed_by=("record.trace", "script"))
POP_MODE = Target(_DISPATCH, "_pop_mode", "()", needed_by=_TRACE)
PUSH_MODE = Target(_DISPATCH, "_push_mode", "(mode)", needed_by=_TRACE)
NO_MODES = Target(_DISPATCH, "_disable_current_modes", "()", needed_by=("script",))
SKIP_DYNAMO = replaced(
    _DISPATCH, "TorchDispatchMode._should_skip_dynamo", "()", optional_for=_SIMULATED,
    consequence="the simulator is slower",
)  # fmt: skip
PLAIN_DISPATCH = Target("torch._C", "_disabled_torch_dispatch_impl", needed_by=_TRACED)
GATHER_STACK = Target("torch._C", "_profiler.gather_traceback", needed_by=_TRACED)
SYMBOLIZE = Target("torch._C", "_profiler.symbolize_tracebacks", needed_by=_TRACED)
GRAPH_TASK = Target("torch._C", "_current_graph_task_id", needed_by=("record.trace", "simulate.world", "attach"))
_UNCOMPILED = {
    **optional("torch.compile looks into the trace's own code, which costs time", _TRACE),
    "or_else": ("_dynamo.eval_frame.skip_code",),
}
SKIP_COMPILER = Target("torch._C", "_dynamo.eval_frame.set_code_exec_strategy", **_UNCOMPILED)
FRAME_ACTION = read("torch._C", "_dynamo.eval_frame._FrameAction", **_UNCOMPILED)
FRAME_STRATEGY = read("torch._C", "_dynamo.eval_frame._FrameExecStrategy", **_UNCOMPILED)
# Torch calls a subclass's `__torch_function__` for each attribute of it that is read, except inside this.
NO_FUNCTIONS = Target("torch._C", "DisableTorchFunctionSubclass", "()", needed_by=("record.cuda", *_TRACED))
# Torch's own code imports the compiler through it when stacks are made readable.
LAZY_MODULES = replaced(
    "torch", "__getattr__", "(name)",
    **optional("torch's compiler is imported when a recording is written, which sets TORCHINDUCTOR_CACHE_DIR",
               ("record.cuda", "record.trace")),
)  # fmt: skip
STORAGE_KEY = read("torch", "UntypedStorage._cdata", needed_by=("record.cuda", *_TRACED))
STORAGE_RESIZE = replaced("torch", "UntypedStorage.resize_", "(self, size)", needed_by=_TRACED)
OPERATOR_SCHEMA = read("torch", "ops.aten.add.Tensor._schema", needed_by=_TRACED)

COMPILED_LAUNCH = replaced(
    "torch._inductor.runtime.triton_heuristics", "CachingAutotuner.run", "(self, *args, **kwargs)",
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
BEFORE_HOOKS = assigned("torch.nn.modules.module", "Module._forward_pre_hooks", needed_by=_HOOKED)
AFTER_HOOKS = assigned("torch.nn.modules.module", "Module._forward_hooks", needed_by=_HOOKED)
BEFORE_BACKWARD_HOOKS = assigned("torch.nn.modules.module", "Module._backward_pre_hooks", needed_by=("lean",))
AFTER_BACKWARD_HOOKS = assigned("torch.nn.modules.module", "Module._backward_hooks", needed_by=("lean",))
GRADIENT_HOOKS = read("torch", "Tensor._backward_hooks", needed_by=("lean",))
ACCUMULATED_HOOKS = read("torch", "Tensor._post_accumulate_grad_hooks", needed_by=("lean",))
PROFILED = replaced("torch.autograd.profiler", "record_function.__enter__", "(self)", needed_by=_SIMULATED)
PROFILED_END = replaced(
    "torch.autograd.profiler", "record_function.__exit__", "(self, exc_type, exc_value, traceback)",
    needed_by=_SIMULATED,
)  # fmt: skip
BEFORE_STEP = Target(
    "torch.optim.optimizer", "register_optimizer_step_pre_hook", "(hook)", needed_by=(*_WATCHED, *_TRACED)
)
AFTER_STEP = Target(
    "torch.optim.optimizer", "register_optimizer_step_post_hook", "(hook)", needed_by=(*_WATCHED, *_TRACED)
)
BACKWARD = replaced(
    "torch.autograd", "backward", "(*args, **kwargs)", needed_by=_SIMULATED, optional_for=("run", "attach"),
    consequence="phase backward cannot be marked", used_in="torch:Tensor.backward",
)  # fmt: skip
CLIP = replaced(
    "torch.nn.utils.clip_grad", "clip_grad_norm_", "(*args, **kwargs)", optional_for=("run",),
    consequence="gradient clipping cannot be counted to optimizer_step",
)  # fmt: skip
IS_COMPILING = Target(
    "torch.compiler", "is_compiling", "()", or_else=("torch._utils:is_compiling",), needed_by=_WATCHED
)

# -- the fake world --------------------------------------------------------------------------------------------------

FAKE_TENSOR = read(_FAKE, "FakeTensor", needed_by=("simulate.world", "lean"))
FAKE_CONSTANT = assigned(_FAKE, "FakeTensor.constant", needed_by=_SIMULATED)
FAKE_DEVICE = assigned(_FAKE, "FakeTensor.fake_device", needed_by=_SIMULATED)
FAKE_MODE = Target(_FAKE, "FakeTensorMode", "(*, allow_non_fake_inputs)", needed_by=_SIMULATED)
_FASTER = optional("the simulator is about 1.5 times slower", _SIMULATED)
FAKE_SYMBOLIC = read("torch", "Tensor._has_symbolic_sizes_strides", **_FASTER)
NO_DISPATCH = read("torch._C", "_DisableTorchDispatch", **_FASTER)
MAKE_SUBCLASS = read("torch", "Tensor._make_subclass", **_FASTER)
NO_DATA_POINTER = read("torch._C", "_set_throw_on_mutable_data_ptr", **_FASTER)
KEYS_OF = read("torch._C", "_dispatch_key_set", **_FASTER)
NEEDS_VALUES = read(_FAKE, "DataDependentOutputException", needed_by=_SIMULATED)
NEEDS_SHAPES = read(_FAKE, "DynamicOutputShapeException", needed_by=_SIMULATED)
UNSUPPORTED = read(_FAKE, "UnsupportedOperatorException", needed_by=_SIMULATED)
MODULE_APPLY = replaced("torch.nn", "Module._apply", "(self, fn, recurse)", needed_by=_SIMULATED)
MODULE_PARAMETERS = assigned("torch.nn", "Module._parameters", needed_by=_SIMULATED)
MODULE_BUFFERS = assigned("torch.nn", "Module._buffers", needed_by=_SIMULATED)
MODULE_TO = replaced("torch.nn", "Module.to", "(self, *args, **kwargs)", needed_by=("script",))
MODULE_CUDA = replaced("torch.nn", "Module.cuda", "(self, *args, **kwargs)", needed_by=("script",))
PARSE_TO = Target("torch._C", "_nn._parse_to", needed_by=("script",))
INFERENCE_MODE = Target("torch", "inference_mode", "(mode)", needed_by=_SIMULATED)
ENGINE = read("torch.autograd.graph", "_engine_run_backward", needed_by=_SIMULATED)
SAVED_HOOKS = Target("torch.autograd.graph", "saved_tensors_hooks", "(pack_hook, unpack_hook)", needed_by=_SIMULATED)
SAVE_ON_CPU = replaced(
    "torch.autograd.graph", "save_on_cpu", "(pin_memory, device_type)", needed_by=("simulate.offloaded",)
)
STORAGE_USES = Target("torch._C", "_storage_Use_Count", needed_by=_SIMULATED)
TENSOR_USES = read("torch", "Tensor._use_count", needed_by=_SIMULATED)
FOREACH_DEVICES = replaced(
    "torch.utils._foreach_utils", "_get_foreach_kernels_supported_devices", "()", needed_by=_SIMULATED,
    used_in="_device_has_foreach_support",
)  # fmt: skip
FOREACH_DEVICES_IN_OPTIMIZERS = replaced(
    "torch.optim.optimizer", "_get_foreach_kernels_supported_devices", "()", needed_by=_SIMULATED,
    used_in="_default_to_fused_or_foreach",
)  # fmt: skip
FOREACH_TYPES = read("torch.optim.optimizer", "_foreach_supported_types", needed_by=_SIMULATED)
FOREACH_TYPES_OF_NORMS = read("torch.utils._foreach_utils", "_foreach_supported_types", needed_by=_SIMULATED)
CONTIGUOUS_STRIDES = Target("torch._prims_common", "make_contiguous_strides_for", "(shape)", needed_by=_SIMULATED)
STEP_IF_FINITE = replaced(
    "torch.amp.grad_scaler", "GradScaler._maybe_opt_step", "(self, optimizer, optimizer_state, *args, **kwargs)",
    needed_by=_SIMULATED,
)  # fmt: skip
ADAM_STATE = replaced("torch.optim.adam", "Adam._init_group", "(self, group, *lists)", needed_by=_SIMULATED)
# AdamW inherits it, until torch._dynamo is imported, which gives every optimizer class one of its own.
ADAMW_STATE = replaced("torch.optim.adamw", "AdamW._init_group", "(self, group, *lists)", needed_by=_SIMULATED)
RMSPROP_STATE = replaced("torch.optim.rmsprop", "RMSprop._init_group", "(self, group, *lists)", needed_by=_SIMULATED)
LOADER_ITERATOR = replaced(
    "torch.utils.data.dataloader", "_BaseDataLoaderIter.__init__", "(self, loader)", needed_by=_SIMULATED
)
EXCLUDE_KEYS = Target("torch._C", "_ExcludeDispatchKeyGuard", needed_by=_SIMULATED)
KEY_SET = read("torch._C", "DispatchKeySet", needed_by=_SIMULATED)
AUTOCAST_KEY = read("torch._C", "DispatchKey.AutocastCPU", needed_by=_SIMULATED)
LIBRARY_DESTROY = Target("torch.library", "Library._destroy", "(self)", needed_by=_SIMULATED)
ATTENTION = read("torch.nn.functional", "scaled_dot_product_attention", needed_by=_SIMULATED)
DROPOUT = replaced("torch.nn.functional", "dropout", "(input, p, training, inplace)", needed_by=_SIMULATED)
SAFE_SOFTMAX = Target("torch", "ops.aten._safe_softmax.default", "(self, dim)", needed_by=_SIMULATED)
SOFTMAX_BACKWARD = read("torch", "ops.aten._softmax_backward_data.default", needed_by=_SIMULATED)
FOREACH_NORM = read("torch", "ops.aten._foreach_norm.Scalar", needed_by=_SIMULATED)
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
_KEPT = optional("selective checkpointing computes attention again where this kernel runs it", _LEAN)
CUDNN = Target("torch", "ops.aten._scaled_dot_product_cudnn_attention.default", **_KEPT)
FUSED = Target("torch", "ops.aten._scaled_dot_product_fused_attention_overrideable.default", **_KEPT)
FLASH_FORWARD = Target("torch", "ops.aten._flash_attention_forward.default", **_KEPT)
EFFICIENT_FORWARD = Target("torch", "ops.aten._efficient_attention_forward.default", **_KEPT)
