"""Declare what memprof uses of PEFT."""

from __future__ import annotations

from memprof.compat.targets import Target, assigned, optional, read

CONFIGS = assigned(
    "peft.peft_model", "PeftModel.peft_config", needed_by=("lean", "simulate"), optional_for=("callback", "attach"),
    consequence="adapters cannot be told from weights",
)  # fmt: skip
BASE_MODEL = Target("peft.peft_model", "PeftModel.get_base_model", "(self)", needed_by=("lean", "simulate"))
DISABLE = Target("peft.peft_model", "PeftModel.disable_adapter", needed_by=("simulate",))
_REFERENCE = optional("phases reference_logprobs and old_logprobs cannot be told apart")
DISABLED = read("peft.tuners.tuners_utils", "BaseTunerLayer.disable_adapters", needed_by=("simulate",), **_REFERENCE)
ACTIVE = read("peft.tuners.tuners_utils", "BaseTunerLayer.active_adapters", needed_by=("simulate",), **_REFERENCE)
LORA = Target(
    "peft.tuners.lora.config", "LoraConfig", "(*, r, lora_alpha, target_modules, task_type, **kwargs)",
    needed_by=("simulate",),
)  # fmt: skip
INVOCATION = read("peft.tuners.lora.config", "LoraConfig.alora_invocation_tokens", needed_by=("lean",))
PROMPT_LEARNING = read("peft.config", "PeftConfig.is_prompt_learning", needed_by=("lean",))
