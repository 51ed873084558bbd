"""Declare what memprof uses of transformers."""

from __future__ import annotations

from memprof.compat.targets import Target, assigned, keyed, optional, read, replaced

_TRAINER = "transformers.trainer"
_CACHE = "transformers.cache_utils"
_MODELS = "transformers.modeling_utils"
_CONFIG = "transformers.configuration_utils"
_GENERATION = "transformers.generation.utils"
_LEAN, _SIMULATED, _SCRIPT = ("lean",), ("simulate",), ("script",)
_SAVING, _EVALUATING = optional("phase save cannot be marked"), optional("phase evaluate cannot be marked")
_SEEN = optional("an exception that ends the run may not be seen")
_CACHES = optional("keys and values of generation cannot be known", ("callback", "run", "attach"))

# -- Trainer ---------------------------------------------------------------------------------------------------------

TRAINER_INIT = replaced(
    _TRAINER, "Trainer.__init__", "(self, *, model, args, callbacks, **kwargs)", needed_by=("run", "script")
)
HANDLER = assigned(_TRAINER, "Trainer.callback_handler", needed_by=("callback", "run"))
CALLBACKS = assigned("transformers.trainer_callback", "CallbackHandler.callbacks", needed_by=("callback",))
TRAINING_STEP = Target(
    _TRAINER, "Trainer.training_step", "(self, model, inputs, num_items_in_batch)", needed_by=("callback", "simulate")
)
TRAIN = replaced(_TRAINER, "Trainer.train", "(self, **kwargs)", needed_by=_SCRIPT)
SAVE = replaced(_TRAINER, "Trainer.save_model", "(self, *args, **kwargs)", needed_by=_SCRIPT, **_SAVING)
PUSH = replaced(_TRAINER, "Trainer.push_to_hub", "(self, *args, **kwargs)", needed_by=_SCRIPT)
LOSS = Target(
    _TRAINER, "Trainer.compute_loss", "(self, model, inputs, *args, **kwargs)", needed_by=_SIMULATED,
    optional_for=("callback",), consequence="phase forward cannot be marked",
)  # fmt: skip
LOSS_CONTEXT = replaced(
    _TRAINER, "Trainer.compute_loss_context_manager", "(self)", needed_by=_LEAN, used_in="Trainer.training_step"
)
COUNTED_FLOS = replaced(
    _TRAINER, "Trainer.floating_point_ops", "(self, inputs)", needed_by=_SIMULATED, used_in="Trainer._run_epoch"
)
CREATE_OPTIMIZER = replaced(
    _TRAINER, "Trainer.create_optimizer", "(self, model)", needed_by=("simulate.zero",),
    used_in="Trainer.create_optimizer_and_scheduler",
)  # fmt: skip
MAKE_ACCELERATOR = replaced(
    "transformers.trainer", "Trainer.create_accelerator_and_postprocess", "(self)", needed_by=_SIMULATED,
    used_in="Trainer.__init__",
)  # fmt: skip
OPTIMIZER_OF = replaced(
    _TRAINER, "Trainer.get_optimizer_cls_and_kwargs", "(args, model)", needed_by=("lean", "simulate"),
    used_in="Trainer.create_optimizer",
)  # fmt: skip
PREPARE_INPUTS = Target(
    _TRAINER, "Trainer._prepare_inputs", "(self, inputs)", needed_by=_SIMULATED, optional_for=("callback",),
    consequence="tensors of a batch cannot be known as inputs, nor their tokens counted",
)  # fmt: skip
SAVE_CHECKPOINT = Target(_TRAINER, "Trainer._save_checkpoint", **_SAVING)
EVALUATE = Target(_TRAINER, "Trainer.evaluate", **_EVALUATING)
PREDICT = Target(_TRAINER, "Trainer.predict", **_EVALUATING)
EPOCH = Target(_TRAINER, "Trainer._run_epoch", or_else=("Trainer._inner_training_loop",), **_SEEN)
FINALIZE = Target(_TRAINER, "Trainer._finalize_training", or_else=("Trainer._inner_training_loop",), **_SEEN)
INNER_EVALUATE = Target(_TRAINER, "Trainer._evaluate", or_else=("Trainer.evaluate",), **_SEEN)
LOG_SAVE_EVALUATE = Target(_TRAINER, "Trainer._maybe_log_save_evaluate", **_SEEN)
BATCH_SIZE = assigned(_TRAINER, "Trainer._train_batch_size", needed_by=("rehearse",))
# Transformers before 4.54 has no such attribute and divides by the argument, as the rehearsal then does too.
ACCUMULATION = assigned(
    _TRAINER, "Trainer.current_gradient_accumulation_steps", optional_for=("rehearse",),
    consequence="the rehearsal divides its loss by gradient_accumulation_steps",
)  # fmt: skip
WRAPPED_MODEL = assigned(
    _TRAINER, "Trainer.model_wrapped", needed_by=_SIMULATED, optional_for=("callback",),
    consequence="the contents of a wrapper such as DistributedDataParallel are unknown",
)  # fmt: skip
ACCELERATOR = assigned(_TRAINER, "Trainer.accelerator", needed_by=("callback", "lean", "simulate"))
ARGUMENTS_CHECK = replaced(
    "transformers.training_args", "TrainingArguments.__post_init__", "(self)", needed_by=_SCRIPT,
    used_in="TrainingArguments.__init__",
)  # fmt: skip

# -- generation and its caches ---------------------------------------------------------------------------------------

SAMPLE = replaced(
    _GENERATION, "GenerationMixin._sample", "(self, *args, **kwargs)", needed_by=_SIMULATED,
    used_in="GENERATION_MODES_MAPPING",
)  # fmt: skip
UNFINISHED = replaced(
    _GENERATION, "GenerationMixin._has_unfinished_sequences", "(self, *args, **kwargs)", needed_by=_SIMULATED,
    used_in="GenerationMixin._sample",
)  # fmt: skip
GENERATE = replaced(
    _GENERATION, "GenerationMixin.generate", "(self, *args, **kwargs)", needed_by=_SIMULATED, optional_for=("run",),
    consequence="phase generate cannot be marked",
)  # fmt: skip
CACHE_UPDATE = replaced(
    _CACHE, "Cache.update", "(self, key_states, value_states, layer_idx, *args, **kwargs)", needed_by=_SIMULATED,
    **_CACHES,
)  # fmt: skip
# The callback looks at no model's code: it would have to be imported.
CACHE_IS_UPDATED = read(
    _CACHE, "Cache.update", needed_by=_SIMULATED,
    used_in="transformers.models.llama.modeling_llama:LlamaAttention.forward",
)  # fmt: skip
CACHE_LAYERS = assigned(
    _CACHE, "Cache.layers", or_else=("Cache.key_cache",), needed_by=_SIMULATED, assigned_in=(f"{_CACHE}:DynamicCache",),
    **_CACHES,
)  # fmt: skip
LAYER_KEYS = assigned(
    _CACHE, "CacheLayerMixin.keys", or_else=("DynamicCache.key_cache",), needed_by=_SIMULATED,
    assigned_in=(f"{_CACHE}:DynamicCache",), optional_for=("callback", "run", "attach"),
    consequence="keys of generation cannot be known",
)  # fmt: skip
LAYER_VALUES = assigned(
    _CACHE, "CacheLayerMixin.values", or_else=("DynamicCache.value_cache",), needed_by=_SIMULATED,
    assigned_in=(f"{_CACHE}:DynamicCache",), optional_for=("callback", "run", "attach"),
    consequence="values of generation cannot be known",
)  # fmt: skip
QUANTIZED_KEYS = assigned(
    _CACHE, "QuantizedLayer._quantized_keys", needed_by=_SIMULATED, optional_for=("callback", "run", "attach"),
    consequence="keys of a quantised cache cannot be known",
)  # fmt: skip
QUANTIZED_VALUES = assigned(
    _CACHE, "QuantizedLayer._quantized_values", needed_by=_SIMULATED, optional_for=("callback", "run", "attach"),
    consequence="values of a quantised cache cannot be known",
)  # fmt: skip
CACHE_STATE = assigned(_CACHE, "LinearAttentionCacheLayerMixin.recurrent_states", needed_by=_SIMULATED)
CACHE_LENGTH = assigned(_CACHE, "DynamicSlidingWindowLayer.cumulative_length", needed_by=_SIMULATED)
CACHE_WINDOW = assigned(_CACHE, "DynamicSlidingWindowLayer.sliding_window", needed_by=_SIMULATED)
CACHE_RESIDUAL = assigned(_CACHE, "QuantizedLayer.residual_length", needed_by=_SIMULATED)
QUANTIZE = replaced(
    _CACHE, "QuantizedLayer._quantize", "(self, tensor, axis)", needed_by=_SIMULATED, used_in="QuantizedLayer.update"
)
DEQUANTIZE = replaced(
    _CACHE, "QuantizedLayer._dequantize", "(self, q_tensor)", needed_by=_SIMULATED, used_in="QuantizedLayer.update"
)
QUANTO_LAYER = read(_CACHE, "QuantoQuantizedLayer", needed_by=_SIMULATED, used_in="QuantizedCache.__init__")

# -- masks, attention and checkpointing ------------------------------------------------------------------------------

MASK_IS_ALL = replaced(
    "transformers.masking_utils", "fast_all", "(tensor)", needed_by=_SIMULATED, used_in="_ignore_causal_mask_sdpa"
)
IS_TRACING = replaced(
    "transformers.masking_utils", "is_tracing", "(_)", needed_by=_SIMULATED, used_in="_ignore_causal_mask_sdpa"
)
ATTENTION_FUNCTIONS = Target(_MODELS, "ALL_ATTENTION_FUNCTIONS.register", "(key, value)", needed_by=_LEAN)
ATTENTION_KIND = assigned(
    _CONFIG, "PreTrainedConfig._attn_implementation", needed_by=_LEAN, optional_for=("callback",),
    assigned_in=(f"{_CONFIG}:PretrainedConfig",), consequence="the kind of attention cannot be reported",
)  # fmt: skip
MODEL_NAME = assigned(
    _CONFIG, "PreTrainedConfig._name_or_path", needed_by=("lean", "simulate"),
    assigned_in=(f"{_CONFIG}:PretrainedConfig",), optional_for=("callback",),
    consequence="the model's name cannot be reported",
)  # fmt: skip
TEXT_CONFIG = Target(_CONFIG, "PreTrainedConfig.get_text_config", "(self, *, decoder)", needed_by=("lean", "simulate"))
TAKES_ATTENTION_ARGUMENTS = read(_MODELS, "PreTrainedModel._supports_attention_backend", needed_by=_LEAN)
DECODER_LAYER = read("transformers.modeling_layers", "GradientCheckpointingLayer", needed_by=_LEAN)
CHECKPOINTING = replaced(
    _MODELS, "PreTrainedModel.gradient_checkpointing_enable", "(self, gradient_checkpointing_kwargs, **kwargs)",
    needed_by=("simulate.offloaded",), used_in="PreTrainedModel.activation_checkpointing_enable",
)  # fmt: skip
OFFLOADED_CHECKPOINTING = Target(
    _MODELS, "PreTrainedModel._activation_checkpointing_enable",
    "(self, activation_checkpointing_kwargs, every_n_layers, offload)", needed_by=("simulate.offloaded",),
)  # fmt: skip
SAVE_ON_CPU = replaced(
    _MODELS, "save_on_cpu", "(pin_memory, device_type)", needed_by=("simulate.offloaded",),
    used_in="PreTrainedModel._activation_checkpointing_enable",
)  # fmt: skip

# -- a router's auxiliary loss ---------------------------------------------------------------------------------------

LOAD_BALANCING = Target(
    "transformers.models.mixtral.modeling_mixtral", "load_balancing_loss_func",
    "(gate_logits, num_experts, top_k, attention_mask)", needed_by=("lean.moe",),
    used_in="trl.trainer.utils:add_fused_lm_head",
)  # fmt: skip

# -- loading, for a script that is simulated -------------------------------------------------------------------------

AUTO_CLASS = read("transformers.models.auto.auto_factory", "_BaseAutoModelClass", needed_by=_SCRIPT)
AUTO_FROM_CONFIG = Target(
    "transformers.models.auto.auto_factory", "_BaseAutoModelClass.from_config", "(config, **kwargs)",
    needed_by=("simulate",),
)  # fmt: skip
MODEL_FROM_CONFIG = Target(_MODELS, "PreTrainedModel._from_config", "(config, **kwargs)", needed_by=_SIMULATED)
MODEL_FROM_PRETRAINED = replaced(_MODELS, "PreTrainedModel.from_pretrained", "(_, *args, **kwargs)", needed_by=_SCRIPT)
# Set on a model by its name, and by no class's code.
IN_4BIT = keyed(
    "transformers.quantizers.quantizer_bnb_4bit", "is_loaded_in_4bit", needed_by=_SCRIPT,
    used_in="Bnb4BitHfQuantizer._process_model_after_weight_loading",
)  # fmt: skip
TIE_WEIGHTS = Target(_MODELS, "PreTrainedModel.tie_weights", "(self)", needed_by=_SIMULATED)

# -- sharding --------------------------------------------------------------------------------------------------------

TP_CONFIG = Target("transformers.distributed", "DistributedConfig", "(*, tp_size)", needed_by=("simulate.tp",))
TP_APPLY = Target(
    "transformers.distributed.tensor_parallel", "apply_tensor_parallelism", "(model, tp_mesh, tp_plan)",
    needed_by=("simulate.tp",),
)  # fmt: skip
TP_PLANS = Target(
    _MODELS, "PreTrainedModel._resolve_parallel_plans", "(self, distributed_config)", needed_by=("simulate.tp",)
)

# -- how the lean trainer's run is spread and scaled -----------------------------------------------------------------

LOSS_IS_SCALED = read(_TRAINER, "Trainer.loss_is_scaled_for_ga", needed_by=_LEAN)
FSDP_IS_ON = assigned(_TRAINER, "Trainer.is_fsdp_enabled", needed_by=_LEAN)
DEEPSPEED_IS_ON = assigned(_TRAINER, "Trainer.is_deepspeed_enabled", needed_by=_LEAN)
