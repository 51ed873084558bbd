"""Whose run it was, and what that framework calls the settings an answer speaks of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.oom.failure import Failure

__all__ = ["PLAIN", "Names", "names_for", "names_in"]


@dataclass(frozen=True)
class Names:
    """The settings of one framework, ready to paste; empty where it has none.

    Attributes:
        framework: as a reader knows it.
        micro_batch: fewer sequences or tokens at once in training, the same gradient.
        checkpointing: recompute activations in backward.
        log_probs: fewer sequences at once where log-probabilities are computed.
        logits: never build all logits at once.
        rollout: fewer sequences generated at once.
        length: shorter completions.
        share: the engine's share of the card.
        sleep: the engine gives its memory back while the policy trains.
        model_len: the longest sequence the engine has to hold.
        max_seqs: the most sequences the engine runs at once.
        optimizer: optimizer state somewhere smaller or elsewhere.
        offload: what to switch off where the host's memory ran out.
        shard: spread weights and gradients over ranks.
    """

    framework: str
    micro_batch: str
    checkpointing: str
    log_probs: str = ""
    logits: str = ""
    rollout: str = ""
    length: str = ""
    share: str = ""
    sleep: str = ""
    model_len: str = ""
    max_seqs: str = ""
    optimizer: str = ""
    offload: str = ""
    shard: str = ""


_TRL = Names(
    "TRL",
    micro_batch="halve per_device_train_batch_size and double gradient_accumulation_steps",
    checkpointing="gradient_checkpointing=True",
    log_probs="halve per_device_train_batch_size and double gradient_accumulation_steps",
    logits="use a loss that never builds all logits (TRL >= 1.0 does, older: use_liger_kernel=True)",
    rollout="lower per_device_train_batch_size × steps_per_generation",
    length="lower max_completion_length",
    share="vllm_gpu_memory_utilization",
    sleep="vllm_enable_sleep_mode=True",
    model_len="vllm_max_model_length",
    optimizer="optim='paged_adamw_8bit' or 'adamw_8bit'",
    offload="offload_optimizer and offload_param in the DeepSpeed or FSDP config",
    shard="accelerate with FSDP or DeepSpeed ZeRO-3",
)
_UNSLOTH = Names(
    "Unsloth",
    micro_batch="halve per_device_train_batch_size and double gradient_accumulation_steps",
    checkpointing="use_gradient_checkpointing='unsloth' in get_peft_model",
    log_probs="unsloth_grpo_mini_batch=1 and a larger unsloth_logit_chunk_multiplier (16)",
    logits="unsloth_grpo_mini_batch=1 and a larger unsloth_logit_chunk_multiplier (16)",
    rollout="lower num_generations or per_device_train_batch_size",
    length="lower max_completion_length and max_seq_length",
    share="gpu_memory_utilization of FastLanguageModel.from_pretrained",
    sleep="os.environ['UNSLOTH_VLLM_STANDBY'] = '1' before the import",
    model_len="max_seq_length",
    optimizer="optim='paged_adamw_8bit' or 'adamw_8bit'",
)
_VERL = Names(
    "verl",
    micro_batch="lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (with use_dynamic_bsz=True: "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu)",
    checkpointing="actor_rollout_ref.model.enable_gradient_checkpointing=True",
    log_probs="lower actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu and "
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu (dynamic: log_prob_max_token_len_per_gpu)",
    logits="actor_rollout_ref.model.use_fused_kernels=True, or "
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking=True",
    rollout="lower actor_rollout_ref.rollout.max_num_batched_tokens or max_num_seqs",
    length="lower data.max_response_length",
    share="actor_rollout_ref.rollout.gpu_memory_utilization",
    sleep="actor_rollout_ref.rollout.free_cache_engine=True",
    model_len="actor_rollout_ref.rollout.max_model_len",
    max_seqs="actor_rollout_ref.rollout.max_num_seqs",
    optimizer="actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
    offload="actor_rollout_ref.actor.fsdp_config.param_offload and optimizer_offload, "
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    shard="more ranks, or actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
)
_SLIME = Names(
    "slime",
    micro_batch="lower --max-tokens-per-gpu (with --use-dynamic-batch-size), else --micro-batch-size",
    checkpointing="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    log_probs="--log-probs-chunk-size, or lower --log-probs-max-tokens-per-gpu",
    logits="--log-probs-chunk-size 1024, --context-parallel-size 2 or a larger --tensor-model-parallel-size",
    rollout="lower --sglang-max-running-requests",
    length="lower --rollout-max-response-len",
    share="--sglang-mem-fraction-static",
    sleep="--offload (or --offload-train and --offload-rollout)",
    model_len="--sglang-context-length",
    max_seqs="--sglang-max-running-requests",
    optimizer="--optimizer-cpu-offload --use-precision-aware-optimizer",
    offload="--optimizer-cpu-offload, --offload-train",
    shard="--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size",
)
_OPENRLHF = Names(
    "OpenRLHF",
    micro_batch="lower --micro_train_batch_size",
    checkpointing="--gradient_checkpointing",
    log_probs="lower --micro_rollout_batch_size",
    rollout="lower --micro_rollout_batch_size",
    length="lower --generate_max_len",
    share="--vllm_gpu_memory_utilization",
    sleep="--vllm_enable_sleep (and --deepspeed_enable_sleep)",
    optimizer="--adam_offload",
    offload="--adam_offload, --ref_reward_offload",
    shard="--zero_stage 3",
)
_MEGATRON = Names(
    "Megatron",
    micro_batch="lower --micro-batch-size",
    checkpointing="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    optimizer="--use-distributed-optimizer, --optimizer-cpu-offload",
    offload="--optimizer-cpu-offload",
    shard="--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size",
)
_DEEPSPEED = Names(
    "DeepSpeed",
    micro_batch="halve train_micro_batch_size_per_gpu and double gradient_accumulation_steps",
    checkpointing="gradient checkpointing of the model (gradient_checkpointing_enable())",
    optimizer="zero_optimization.offload_optimizer.device: 'cpu'",
    offload="zero_optimization.offload_optimizer and offload_param (pin_memory: false, or device: 'nvme')",
    shard="zero_optimization.stage: 3",
)
_VLLM = Names(
    "vLLM",
    micro_batch="lower max_num_batched_tokens",
    checkpointing="enforce_eager=True",
    rollout="lower max_num_seqs",
    length="lower max_model_len",
    share="gpu_memory_utilization",
    sleep="enable_sleep_mode=True",
    model_len="max_model_len",
    max_seqs="max_num_seqs",
    shard="tensor_parallel_size=2",
)
_SGLANG = Names(
    "SGLang",
    micro_batch="lower --chunked-prefill-size",
    checkpointing="--disable-cuda-graph",
    rollout="lower --max-running-requests",
    length="lower --context-length",
    share="--mem-fraction-static",
    sleep="--enable-memory-saver",
    model_len="--context-length",
    max_seqs="--max-running-requests",
    shard="--tp 2",
)
_TGI = Names(
    "TGI",
    micro_batch="lower --max-batch-prefill-tokens",
    checkpointing="--cuda-graphs 0",
    rollout="lower --max-batch-total-tokens or --max-concurrent-requests",
    length="lower --max-total-tokens",
    share="--cuda-memory-fraction",
    model_len="--max-total-tokens",
    max_seqs="--max-concurrent-requests",
    shard="--num-shard 2",
)
_NEMO_RL = Names(
    "NeMo-RL",
    micro_batch="lower policy.train_micro_batch_size (packed: policy.sequence_packing.train_mb_tokens)",
    checkpointing="policy.dtensor_cfg.activation_checkpointing=true (Megatron: "
    "policy.megatron_cfg.activation_checkpointing=true)",
    log_probs="lower policy.logprob_batch_size, set policy.logprob_chunk_size",
    logits="policy.logprob_chunk_size=1024",
    rollout="lower policy.generation.vllm_cfg.max_model_len",
    length="lower policy.max_total_sequence_length",
    share="policy.generation.vllm_cfg.gpu_memory_utilization",
    model_len="policy.generation.vllm_cfg.max_model_len",
    offload="policy.dtensor_cfg.cpu_offload",
    shard="policy.dtensor_cfg.tensor_parallel_size, context_parallel_size",
)
_TRANSFORMERS = Names(
    "Transformers",
    micro_batch="halve per_device_train_batch_size and double gradient_accumulation_steps",
    checkpointing="gradient_checkpointing=True",
    logits="use_liger_kernel=True",
    optimizer="optim='paged_adamw_8bit' or 'adamw_8bit'",
    offload="offload in the DeepSpeed or FSDP config, device_map='auto' onto the CPU",
    shard="FSDP or DeepSpeed ZeRO-3",
)
#: Words of no framework.
PLAIN = Names(
    "",
    micro_batch="halve the batch and accumulate gradients over two steps",
    checkpointing="checkpoint activations (gradient_checkpointing_enable(), torch.utils.checkpoint)",
    optimizer="an 8-bit or paged optimizer (bitsandbytes AdamW8bit, PagedAdamW8bit)",
    offload="CPU offload of parameters or optimizer state",
    shard="shard with FSDP or ZeRO",
)

# The first that the text around a failure shows is taken: frameworks before the libraries they are built on.
_SIGNS: tuple[tuple[re.Pattern[str], Names], ...] = (
    (re.compile(r"/verl/|\bverl\.|actor_rollout_ref|\bWorkerDict\b|ActorRolloutRefWorker|\bmain_ppo\b"), _VERL),
    (re.compile(r"/slime/|\bslime\."), _SLIME),
    (re.compile(r"/nemo_rl/|\bnemo_rl\.|MegatronPolicyWorker|DTensorPolicyWorker"), _NEMO_RL),
    (re.compile(r"openrlhf|ActorModelRayActor|PolicyModelActor", re.I), _OPENRLHF),
    (re.compile(r"unsloth", re.I), _UNSLOTH),
    (re.compile(r"/trl/|GRPOTrainer|RLOOTrainer|DPOTrainer|SFTTrainer|grpo_trainer"), _TRL),
    (re.compile(r"/megatron/"), _MEGATRON),
    (re.compile(r"/deepspeed/|\bdeepspeed\.|sigkill_handler"), _DEEPSPEED),
    (re.compile(r"/transformers/trainer\.py|/accelerate/"), _TRANSFORMERS),
    (re.compile(r"/sglang/|\bsglang\b", re.I), _SGLANG),
    (re.compile(r"/vllm/|\bvllm\b|VllmWorker|EngineCore", re.I), _VLLM),
    (re.compile(r"text_generation_(?:launcher|server)|router/src/main\.rs"), _TGI),
)
_OF_PROGRAM = {"vLLM": _VLLM, "SGLang": _SGLANG, "DeepSpeed": _DEEPSPEED, "TGI": _TGI}


def names_for(failure: Failure) -> Names:
    """Return the settings of the framework the failure's frames, message and surroundings show."""
    text = "\n".join([*(frame.path for frame in failure.frames), failure.text, failure.around])
    return names_in(text) or _OF_PROGRAM.get(failure.form.program, PLAIN)


def names_in(text: str) -> Names | None:
    """Return the settings of the framework that a text shows, such as stacks' file names; None where it shows none."""
    return next((names for sign, names in _SIGNS if sign.search(text)), None)
