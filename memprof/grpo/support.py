"""Refuse by name what the lean trainer cannot do, and leave to TRL's own step, also by name, what it does not cut."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from memprof.compat import torch as torch_names
from memprof.compat import transformers
from memprof.compat.peft import CONFIGS, INVOCATION, PROMPT_LEARNING
from memprof.config.gpus import capacity_bytes
from memprof.config.optimizers import optimizer
from memprof.errors import UsageError
from memprof.grpo.loss.load_balancing import LoadBalancing
from memprof.grpo.once_log import OnceLog

_TRUE = ("1", "true", "t", "yes", "y", "on")  # as transformers reads them
# Whose hooks and methods are known to go with pieces.
_LIBRARIES = ("torch.", "accelerate.", "deepspeed.", "memprof.", "peft.", "transformers.", "trl.")
#: Why TRL's step is used where :func:`steps_elsewhere` is true.
PATCHED = "training_step or compute_loss of TRL's trainer is patched"
_OF_GRADIENTS = torch_names.GRADIENT_HOOKS, torch_names.ACCUMULATED_HOOKS
_OF_BACKWARDS = torch_names.BEFORE_BACKWARD_HOOKS, torch_names.AFTER_BACKWARD_HOOKS


def check_supported(args: Any, known_loss: bool = True) -> None:
    """Refuse (UsageError) a combination that cannot work, by name. ``known_loss``: the trainer's loss is TRL's own."""
    name = str(getattr(args.optim, "value", args.optim))
    if optimizer(name).steps_in_backward:  # several backwards would be several steps
        raise UsageError(
            f"optim={name!r} updates the weights inside the backward, and the lean trainer runs several: "
            "choose another optimizer."
        )
    if args.park_weights:
        _check_offload(args)
    if args.memory_budget is not None and str(args.memory_budget).strip().lower() != "auto":
        capacity_bytes(str(args.memory_budget))
    if args.exact_two_pass == "never" and args.top_entropy_quantile < 1.0:
        raise UsageError(
            "top_entropy_quantile compares the tokens of all sequences, which needs a pass over all of them first: "
            "set exact_two_pass='auto' or top_entropy_quantile=1."
        )
    if args.exact_two_pass == "never" and not known_loss:
        raise UsageError(
            "An overridden _compute_loss or _get_per_token_logps_and_entropies needs a pass over all sequences first: "
            "set exact_two_pass='auto'."
        )


def disable_unsupported_sleep(args: Any, log: OnceLog) -> None:
    """Turn vLLM's sleep mode off on a CPU, where vLLM raises an error for it, and log that."""
    if args.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode and args.device.type == "cpu":
        args.vllm_enable_sleep_mode = False
        log.warn("vLLM has no sleep mode on a CPU: vllm_enable_sleep_mode is off.")


def _check_offload(args: Any) -> None:
    if not (args.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode):
        raise UsageError(
            "park_weights frees memory for vLLM in this process: set use_vllm=True, vllm_mode='colocate' and "
            "vllm_enable_sleep_mode=True."
        )
    if sharding := sharding_of(args):
        raise UsageError(f"park_weights moves whole parameters, but {sharding} shards them: set park_weights=False.")


def sharding_of(args: Any) -> str | None:
    """Return what shards the model, "FSDP" or "DeepSpeed", as asked for by the arguments or by ``accelerate launch``,
    which sets environment variables; None if nothing does."""
    for name, asked in (("FSDP", args.fsdp), ("DeepSpeed", args.deepspeed)):
        if asked or os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() in _TRUE:
            return name
    return None


def check_bfloat16_of(capability: tuple[int, int], half: str, args: Any) -> None:
    """Refuse (UsageError) bfloat16, where it is the ``half`` that a model computes in, on a card of compute
    ``capability`` before 8.0: its cuBLAS cannot multiply it into float32, as the head needs."""
    if capability < (8, 0) and half in ("bf16", "bfloat16") and not args.cast_lm_head_to_fp32:
        major, minor = capability
        raise UsageError(
            f"This GPU (compute capability {major}.{minor}) has no bfloat16 matmuls with float32 output, in which the "
            "loss sums: train in fp16 (fp16=True, bf16=False)."
        )


def check_offload_of(args: Any, model: Any, quantization_config: Any = None) -> None:
    """Refuse (UsageError) to park weights that are or will be quantised: merging an adapter replaces them, and the new
    ones would stay on the host. ``model``: the policy, or what it is loaded from."""
    if not args.park_weights:
        return
    asked = args.weights == "nf4" or "quantization_config" in (args.model_init_kwargs or {})
    config = getattr(model, "config", None)
    if asked or quantization_config is not None or getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            "park_weights restores the weights it moved, but quantized ones are replaced while offloaded, where "
            "the adapter is merged for vLLM: set park_weights=False, or load the base in bf16."
        )


def refuse_other_trainers(kind: type, trained_as: type) -> None:
    """Refuse (UsageError) a class that mixes a lean trainer into another of TRL's trainers than its own,
    ``trained_as``, whose loss and arguments are others."""
    for base in kind.__mro__:
        theirs = base.__module__.startswith("trl.") and base.__name__.endswith("Trainer") and base.__name__[0] != "_"
        if theirs and not issubclass(base, trained_as):
            lean = f"Lean{trained_as.__name__}"
            other = "LeanRLOOTrainer" if base.__name__ == "RLOOTrainer" else f"{base.__name__} itself"
            raise UsageError(
                f"{lean} trains with the loss of {trained_as.__name__} and cannot be combined with {base.__name__}: "
                f"use {other}, or {trained_as.__name__}'s settings."
            )


def whole_batch_reason(trainer: Any, balancing: LoadBalancing | None = None) -> str | None:
    """Say why every step of this run goes through TRL's own path, or return None; ``balancing``: the router's auxiliary
    loss."""
    if not trainer.args.micro_splitting:
        return "micro_splitting is off"
    if trainer.args.torch_compile:
        return "torch_compile compiles a forward without chunks"
    if balancing is not None and trainer.args.exact_two_pass == "never":
        return "the router's auxiliary loss needs a pass over all sequences first, but exact_two_pass is 'never'"
    if balancing is not None and (why := balancing.refusal()):
        return f"{why} (router_aux_loss_coef=0 leaves the router's auxiliary loss out)"
    if prompt_learning(trainer.model):
        return "PEFT's prompt learning adds tokens of its own before the prompt"
    if steps_elsewhere(type(trainer)):
        return PATCHED
    if transformers.DEEPSPEED_IS_ON.of(trainer):
        plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
        if int(getattr(plugin, "zero_stage", 0) or 0) == 3:
            return "DeepSpeed ZeRO-3 gathers the head's weight inside TRL's forward only"
    return None


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is not there
        return False


def prompt_learning(model: Any) -> bool:
    """Tell whether PEFT's prompt learning adds tokens of its own before the prompt of ``model``."""
    return any(PROMPT_LEARNING.of(config, False) for config in (CONFIGS.of(model) or {}).values())


def adapter_outside(model: Any) -> str | None:
    """Say what part of an adapter works in PEFT's wrapper only, not in the model inside; None where nothing does."""
    if prompt_learning(model):
        return "PEFT's prompt learning adds tokens of its own before the prompt"
    if any(INVOCATION.of(config, None) for config in (CONFIGS.of(model) or {}).values()):
        return "PEFT tells an aLoRA in its wrapper where its adapter begins"
    return None


def hooked(model: Any) -> str | None:
    """Name the caller's hook that a backward of ``model`` would run once for each chunk; None where there is none."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and any(map(_foreign, _OF_GRADIENTS, (parameter,) * 2)):
            return f"a hook on the gradient of {name} would run once for each chunk"
    for name, module in model.named_modules():
        if any(map(_foreign, _OF_BACKWARDS, (module,) * 2)):
            return f"a backward hook on {name or 'the model'} would run once for each chunk"
    return None


def forward_hooks(model: Any) -> frozenset[Any]:
    """Name the forward hooks of others than the libraries: by module and by code, since a step may make its own."""
    hooks = (
        (name, getattr(hook, "func", hook))
        for name, module in model.named_modules()
        for target in (torch_names.BEFORE_HOOKS, torch_names.AFTER_HOOKS)
        for hook in target.of(module).values()
    )
    return frozenset((name, getattr(hook, "__code__", type(hook))) for name, hook in hooks if not is_librarys(hook))


def _foreign(target: Any, of: Any) -> bool:
    hooks = (target.of(of) or {}).values()
    return any(not is_librarys(getattr(hook, "func", hook)) for hook in hooks)


def steps_elsewhere(kind: type) -> bool:
    """Tell whether somebody has replaced a method by which TRL's trainers, or transformers', take a step."""
    theirs = [base for base in kind.__mro__ if base.__module__.startswith(("trl.", "transformers."))]
    methods = [vars(base)[name] for base in theirs for name in ("training_step", "compute_loss") if name in vars(base)]
    return any(not is_librarys(method) for method in methods)


def is_overridden(trainer: Any, kind: type, name: str) -> bool:
    """Return whether a subclass, or an attribute of ``trainer``, replaces a method of ``kind``.

    Wrappers that memprof's recording sets on the trainer call the method they wrap, and don't count.
    """
    method = getattr(kind, name)
    if getattr(type(trainer), name) is not method:
        return True
    own = vars(trainer).get(name)
    while own is not None and getattr(own, "__func__", own) is not method:
        if not str(getattr(own, "__globals__", {}).get("__name__", "")).startswith("memprof."):
            return True
        own = getattr(own, "__wrapped__", None)
    return False


def has_own_backward(training_step: Any) -> bool:
    """Tell whether an overriding ``training_step`` never calls the one it overrides, and so has its own backward."""
    code = getattr(training_step, "__code__", None)
    return not is_librarys(training_step) and "training_step" not in getattr(code, "co_names", ())


def is_librarys(function: Any) -> bool:
    """Tell whether a function belongs to one of the libraries that are known to go with pieces."""
    return str(getattr(function, "__module__", "")).startswith(_LIBRARIES)

