"""Declare what memprof uses of TRL."""

from __future__ import annotations

from dataclasses import replace

from memprof.compat.targets import Target, assigned, keyed, read, replaced

_GRPO = "trl.trainer.grpo_trainer"
_UTILS = "trl.trainer.utils"
_KERNELS = "trl.kernels.chunked_logprob"
_LEAN, _SIMULATED = ("lean",), ("simulate",)
_BOTH = ("lean", "simulate")

# -- GRPOTrainer: what the lean trainer overrides and the simulator replaces -----------------------------------------

TRAINER_INIT = Target(
    _GRPO, "GRPOTrainer.__init__",
    "(self, model, reward_funcs, args, *, train_dataset, processing_class, reward_processing_classes, peft_config, "
    "callbacks)",
    needed_by=_BOTH,
)  # fmt: skip
CONFIG = Target(
    "trl.trainer.grpo_config", "GRPOConfig.__init__",
    "(self, output_dir, *, use_cpu, bf16, fp16, per_device_train_batch_size, gradient_accumulation_steps, "
    "steps_per_generation, num_iterations, num_generations, max_completion_length, gradient_checkpointing, beta, "
    "loss_type, optim, max_grad_norm, max_steps, logging_strategy, save_strategy, eval_strategy, report_to, "
    "disable_tqdm, dataloader_pin_memory, learning_rate, cache_implementation, generation_kwargs, **kwargs)",
    needed_by=_BOTH,
)  # fmt: skip
COMPUTE_LOSS = replaced(
    _GRPO, "GRPOTrainer.compute_loss", "(self, model, inputs, return_outputs, num_items_in_batch)", needed_by=_LEAN,
    used_in="transformers.trainer:Trainer.training_step",
)  # fmt: skip
LOSS = replaced(
    _GRPO, "GRPOTrainer._compute_loss", "(self, model, inputs)", needed_by=_BOTH, used_in="GRPOTrainer.compute_loss"
)
LOGPS = replaced(
    _GRPO, "GRPOTrainer._get_per_token_logps_and_entropies",
    "(self, model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **kwargs)",
    needed_by=_BOTH, used_in="GRPOTrainer._compute_loss",
)  # fmt: skip
GENERATE_SINGLE_TURN = replaced(
    _GRPO, "GRPOTrainer._generate_single_turn", "(self, prompt_ids, images, multimodal_fields, *args, **kwargs)",
    needed_by=_BOTH, used_in="GRPOTrainer._generate",
)  # fmt: skip
TOKENIZE_PROMPTS = replaced(
    _GRPO, "GRPOTrainer._tokenize_prompts", "(self, prompts)", needed_by=_SIMULATED, used_in="GRPOTrainer._generate"
)

# -- GRPOTrainer: attributes of its instances ------------------------------------------------------------------------

METRICS = assigned(_GRPO, "GRPOTrainer._metrics", needed_by=_LEAN)
TOKENIZER = assigned(_GRPO, "GRPOTrainer._tokenizer", needed_by=_LEAN)
ENTROPY_BONUS = assigned(_GRPO, "GRPOTrainer._entropy_bonus_enabled", needed_by=_LEAN)
ENTROPY_WINDOW = assigned(_GRPO, "GRPOTrainer._entropy_window_stats", needed_by=_LEAN)
LAST_ENTROPY = assigned(_GRPO, "GRPOTrainer._last_world_entropy", needed_by=_LEAN)
ENTROPY_COEFFICIENT = assigned(_GRPO, "GRPOTrainer.entropy_coef", needed_by=_LEAN)
TEMPERATURE = assigned(_GRPO, "GRPOTrainer.temperature", needed_by=_LEAN)
BETA = assigned(_GRPO, "GRPOTrainer.beta", needed_by=_LEAN)
CONTINUOUS_BATCHING = assigned(_GRPO, "GRPOTrainer.use_transformers_continuous_batching", needed_by=_LEAN)
USE_VLLM = assigned(_GRPO, "GRPOTrainer.use_vllm", needed_by=_BOTH)
GENERATION_KWARGS = assigned(_GRPO, "GRPOTrainer.generation_kwargs", needed_by=_SIMULATED)
GENERATION_CONFIG = assigned(
    _GRPO, "GRPOTrainer.generation_config", needed_by=_SIMULATED, optional_for=("rehearse",),
    consequence="the rehearsal cannot make completions of full length",
)  # fmt: skip
REFERENCE = assigned(
    _GRPO, "GRPOTrainer.ref_model", needed_by=_BOTH, optional_for=("callback",),
    consequence="phase reference_logprobs and the reference model's parameters cannot be told apart",
)  # fmt: skip
REWARDS = assigned(
    _GRPO, "GRPOTrainer.reward_funcs", needed_by=_SIMULATED, optional_for=("callback",),
    consequence="parameters of reward models cannot be told apart",
)  # fmt: skip
BUFFERED = assigned(
    _GRPO, "GRPOTrainer._buffered_inputs", needed_by=_SIMULATED, optional_for=("callback",),
    consequence="tensors stored between generation and training cannot be recognized as inputs",
)  # fmt: skip
MICRO_STEP = assigned(
    _GRPO, "GRPOTrainer._step", needed_by=_SIMULATED, optional_for=("callback",),
    consequence="generation cycles cannot be told apart, and one step is recorded",
)  # fmt: skip
ITERATIONS = assigned(
    _GRPO, "GRPOTrainer.num_iterations", optional_for=("callback",),
    consequence="a generation cycle is taken to have one iteration",
)  # fmt: skip
COMPLETION_LENGTH = assigned(
    _GRPO, "GRPOTrainer.max_completion_length", needed_by=_BOTH, optional_for=("rehearse",),
    consequence="the rehearsal cannot make completions of full length",
)  # fmt: skip
VLLM = assigned(
    _GRPO, "GRPOTrainer.vllm_generation", or_else=("GRPOTrainer.llm",), optional_for=("callback",),
    consequence="phases weight_sync, sleep and wake of a vLLM in this process cannot be marked",
)  # fmt: skip

# -- GRPOTrainer: methods that are phases ----------------------------------------------------------------------------

GENERATE = Target(_GRPO, "GRPOTrainer._generate", "(self, prompts, *args, **kwargs)", needed_by=_SIMULATED)
# Before TRL had the method, the phase is marked by the `generate` of what the other one calls.
GENERATE_PHASE = Target(
    _GRPO, "GRPOTrainer._generate", or_else=("GRPOTrainer._generate_and_score_completions",),
    optional_for=("callback",), consequence="phase generate cannot be marked",
)  # fmt: skip
SCORE_COMPLETIONS = Target(
    _GRPO, "GRPOTrainer._generate_and_score_completions", "(self, inputs)", needed_by=_SIMULATED,
    or_else=("GRPOTrainer._prepare_inputs",), optional_for=("callback",),
    consequence="tensors of a generation batch cannot be known as inputs",
)  # fmt: skip
PREPARE_INPUTS = Target(
    _GRPO, "GRPOTrainer._prepare_inputs", "(self, generation_batch)", needed_by=_SIMULATED, optional_for=("callback",),
    or_else=("transformers.trainer:Trainer._prepare_inputs",),
    consequence="tensors of a micro-batch cannot be known as inputs, nor their tokens counted",
)  # fmt: skip
SCORE_REWARDS = Target(
    _GRPO, "GRPOTrainer._calculate_rewards", needed_by=_SIMULATED, optional_for=("callback",),
    consequence="phase reward cannot be marked",
)  # fmt: skip
LOGPS_OUTSIDE_LOSS = Target(
    _GRPO, "GRPOTrainer._get_per_token_logps_and_entropies", "(self, model, *args, **kwargs)",
    or_else=("GRPOTrainer._get_per_token_logps",), optional_for=("callback",),
    consequence="phases old_logprobs and reference_logprobs cannot be marked",
)  # fmt: skip
SYNC_WEIGHTS = Target(
    "trl.generation.vllm_generation", "VLLMGeneration.sync_weights", optional_for=("callback",),
    or_else=(f"{_GRPO}:GRPOTrainer._move_model_to_vllm", f"{_GRPO}:GRPOTrainer._sync_fsdp_params_to_vllm"),
    consequence="phase weight_sync of a vLLM in this process cannot be marked",
)  # fmt: skip
GENERATE_VLLM = Target(
    "trl.generation.vllm_generation", "VLLMGeneration.generate", optional_for=("callback",),
    or_else=(f"{_GRPO}:GRPOTrainer._generate", f"{_GRPO}:GRPOTrainer._generate_and_score_completions"),
    consequence="phase generate of a vLLM in this process cannot be marked",
)  # fmt: skip

# -- ms-swift's trainer: derived from GRPOTrainer, it calls methods of its own ----------------------------------------

SWIFT_GENERATE = Target(
    "swift.rlhf_trainers.rollout_mixin", "RolloutTrainerMixin._generate_completions", optional_for=("callback",),
    consequence="phase generate cannot be marked under ms-swift",
)  # fmt: skip
SWIFT_REWARDS = Target(
    "swift.rlhf_trainers.grpo_trainer", "GRPOTrainer._compute_rewards_per_func", optional_for=("callback",),
    consequence="phase reward cannot be marked under ms-swift",
)  # fmt: skip

# -- functions -------------------------------------------------------------------------------------------------------

CREATE_MODEL = replaced(
    _GRPO, "create_model_from_path", "(model_id, architecture, **kwargs)", needed_by=_SIMULATED,
    used_in="GRPOTrainer.__init__",
)  # fmt: skip
CREATE_DPO_REFERENCE = replaced(
    "trl.trainer.dpo_trainer", "create_model_from_path", "(model_id, **kwargs)", needed_by=_SIMULATED,
    used_in="DPOTrainer.__init__",
)  # fmt: skip
CREATE_RLOO_REFERENCE = replaced(
    "trl.trainer.rloo_trainer", "create_model_from_path", "(model_id, **kwargs)", needed_by=_SIMULATED,
    used_in="RLOOTrainer.__init__",
)  # fmt: skip
CREATE_REFERENCE = replaced(
    _UTILS, "create_model_from_path", "(model_id, **kwargs)", needed_by=("lean", "simulate.lean")
)
MODEL_ID = Target(_UTILS, "get_config_model_id", "(config)", needed_by=_LEAN)
FUSED_HEAD = Target(_UTILS, "add_fused_lm_head", "(model, *, temperature)", needed_by=_LEAN)
PROFILED = Target("trl.extras.profiling", "profiling_decorator", "(_)", needed_by=_LEAN)
UNWRAPPED = Target(
    "trl.models", "unwrap_model_for_generation",
    "(model, accelerator, *, gather_deepspeed3_params, generation_kwargs, gradient_checkpointing_kwargs)",
    needed_by=_SIMULATED,
)  # fmt: skip
GATHERED_HEAD = replaced(
    _UTILS, "maybe_gather_lm_head_ctx", "(*params)", needed_by=("simulate.zero",), used_in="add_fused_lm_head"
)
SELECTIVE = Target(
    "trl.models", "enable_selective_activation_checkpointing", "(model)", needed_by=("simulate.selective",)
)

# -- the loss's Triton kernels, which allocate nothing ---------------------------------------------------------------

USE_TRITON = replaced(
    _KERNELS, "_use_triton", "(device)", needed_by=_SIMULATED, used_in="ChunkedLogProbFunction.forward"
)
USE_TRITON_IN_HEAD = replaced(_UTILS, "_use_triton", "(device)", needed_by=_SIMULATED, used_in="add_fused_lm_head")
FORWARD_KERNEL = read(_KERNELS, "_forward_kernel", needed_by=_SIMULATED, used_in="ChunkedLogProbFunction.forward")
BACKWARD_KERNEL = read(_KERNELS, "_backward_kernel", needed_by=_SIMULATED, used_in="ChunkedLogProbFunction.backward")
ADD_PRODUCT = replaced(
    _KERNELS, "_addmm_fp32", "(acc, a, b)", needed_by=_SIMULATED, used_in="ChunkedLogProbFunction.backward"
)

# -- GRPOTrainer: settings that decide how the lean trainer cuts a micro-batch ---------------------------------------

LOSS_TYPE = assigned(_GRPO, "GRPOTrainer.loss_type", needed_by=_LEAN)
IMPORTANCE_LEVEL = assigned(_GRPO, "GRPOTrainer.importance_sampling_level", needed_by=_LEAN)
ENTROPY_QUANTILE = assigned(_GRPO, "GRPOTrainer.top_entropy_quantile", needed_by=_LEAN)
OFF_POLICY_MASK = assigned(_GRPO, "GRPOTrainer.off_policy_mask_threshold", needed_by=_LEAN)
AUX_LOSS = assigned(_GRPO, "GRPOTrainer.aux_loss_enabled", needed_by=_LEAN)
GROUP_SIZE = assigned(_GRPO, "GRPOTrainer.num_generations", needed_by=_LEAN)

# -- RLOOTrainer: what the lean one overrides and the simulator replaces, under the names that GRPOTrainer has too ---

_RLOO, _LEAN_RLOO = "trl.trainer.rloo_trainer", ("lean.rloo",)
_BOTH_RLOO = ("lean.rloo", "simulate.rloo")
RLOO_INIT = Target(
    _RLOO, "RLOOTrainer.__init__", "(self, model, reward_funcs, args, *, peft_config)", needed_by=_BOTH_RLOO
)
#: What RLOOTrainer has as GRPOTrainer has it, by name.
RLOO_ALIKE = {
    target.name: replace(
        target, module=_RLOO, path=f"RLOOTrainer.{target.name}", needed_by=features,
        used_in=target.used_in.replace("GRPOTrainer", "RLOOTrainer"),
    )
    for target, features in (
        (COMPUTE_LOSS, _LEAN_RLOO), (LOSS, _LEAN_RLOO), (LOGPS, _BOTH_RLOO), (TOKENIZE_PROMPTS, ("simulate.rloo",)),
        (METRICS, _LEAN_RLOO), (TOKENIZER, _LEAN_RLOO),
    )
}  # fmt: skip
RLOO_GENERATE = replaced(
    _RLOO, "RLOOTrainer._generate_single_turn", "(self, prompt_ids, images, multimodal_fields)", needed_by=_BOTH_RLOO,
    used_in="RLOOTrainer._generate",
)  # fmt: skip
RLOO_CONFIG = Target(
    "trl.trainer.rloo_config", "RLOOConfig.__init__",
    "(self, output_dir, *, use_cpu, bf16, fp16, per_device_train_batch_size, gradient_accumulation_steps, "
    "steps_per_generation, num_iterations, num_generations, max_completion_length, gradient_checkpointing, beta, "
    "optim, max_grad_norm, max_steps, cache_implementation, generation_kwargs, **kwargs)",
    needed_by=("simulate.rloo",),
)  # fmt: skip
RLOO_OLD = keyed(_RLOO, "old_logps", used_in="RLOOTrainer._compute_loss", needed_by=_LEAN_RLOO)

# -- keys of a micro-batch -------------------------------------------------------------------------------------------

_WRITES, _READS = "GRPOTrainer._generate_and_score_completions", "GRPOTrainer._compute_loss"
_OF_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_per_token_logps")

#: The lean trainer asks for these by name, and what is not there has a meaning: a micro-batch without
#: ``old_per_token_logps`` is on-policy, one without ``pixel_values`` has no images.
MICRO_BATCH_KEYS = {
    (function, key): keyed(_GRPO, key, used_in=function, needed_by=("lean", "simulate.liger"))
    for function in (_WRITES, _READS)
    for key in (*_OF_TOKENS, "ref_per_token_logps", "pixel_values")
}

# -- settings of GRPOConfig that the lean trainer goes by ------------------------------------------------------------

_ARGUMENTS = "transformers.training_args"

#: Public, and read off the arguments as they are: one that is gone is refused before it is asked for.
CONFIG_FIELDS = {
    field: read(module, f"{kind}.{field}", needed_by=_LEAN)
    for module, kind, fields in (
        ("trl.trainer.grpo_config", "GRPOConfig", (
            "sync_ref_model", "cast_lm_head_to_fp32", "trust_remote_code", "model_init_kwargs",
            "use_bias_correction_kl", "temperature", "top_entropy_quantile",
        )),
        (_ARGUMENTS, "TrainingArguments", ("torch_compile", "fsdp", "deepspeed", "optim", "bf16", "fp16")),
    )
    for field in fields
}  # fmt: skip
