"""Declare what memprof uses of PEFT."""

from __future__ import annotations

from memprof.compat.targets import ASSIGNED, READ, Target

CONFIGS = Target(
    "peft.peft_model", "PeftModel.peft_config", how=ASSIGNED, needed_by=("lean", "simulate"),
    optional_for=("callback", "attach"), consequence="adapters cannot be told from weights",
)  # fmt: skip
BASE_MODEL = Target("peft.peft_model", "PeftModel.get_base_model", "(self)", needed_by=("lean", "simulate"))
DISABLE = Target("peft.peft_model", "PeftModel.disable_adapter", needed_by=("simulate",))
DISABLED = Target(
    "peft.tuners.tuners_utils", "BaseTunerLayer.disable_adapters", how=READ, needed_by=("simulate",),
    optional_for=("callback",), consequence="phases reference_logprobs and old_logprobs cannot be told apart",
)  # fmt: skip
ACTIVE = Target(
    "peft.tuners.tuners_utils", "BaseTunerLayer.active_adapters", how=READ, needed_by=("simulate",),
    optional_for=("callback",), consequence="phases reference_logprobs and old_logprobs cannot be told apart",
)  # fmt: skip
LORA = Target(
    "peft.tuners.lora.config", "LoraConfig", "(*, r, lora_alpha, target_modules, task_type, **kwargs)",
    needed_by=("simulate",),
)  # fmt: skip
INVOCATION = Target("peft.tuners.lora.config", "LoraConfig.alora_invocation_tokens", how=READ, needed_by=("lean",))
PROMPT_LEARNING = Target("peft.config", "PeftConfig.is_prompt_learning", how=READ, needed_by=("lean",))
