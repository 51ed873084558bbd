"""Run by torchrun in two gloo processes: TRL's GRPO trainer with a LoRA, sharded by accelerate's FSDP2.

``grpo_two_ranks FOLDER CASE`` trains two steps and writes ``rank-N.json``: what stopped it, or null. ``generate``
samples with transformers, ``lean`` in the lean trainer; ``beta`` has a KL term, whose reference is the adapter switched
off, and made-up completions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.forked import write_and_leave
from tests.simulate.sharding.adapter_two_ranks import POLICY, _as_a_gpu


def main(folder: Path, case: str) -> None:
    os.environ.update(POLICY, FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    _as_a_gpu()
    trainer = _trainer(folder, case)
    try:
        trainer.train()
        error = None
    except RuntimeError as stopped:
        error = str(stopped)
    write_and_leave(folder, error)


def _trainer(folder: Path, case: str) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from memprof.config.settings import Settings
    from memprof.grpo import LeanGRPOTrainer
    from memprof.simulate.trainer.build import make_tokenizer
    from memprof.simulate.trainer.rollout import fake_rollout
    from tests.simulate.conftest import TINY

    torch.manual_seed(0)
    values = {name: value for name, value in TINY.items() if name != "model_type"}
    arguments = GRPOConfig(
        output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=2, num_generations=2,
        steps_per_generation=1, use_cpu=True, bf16=True, max_completion_length=5,
        beta=0.04 if case == "beta" else 0.0, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = (LeanGRPOTrainer if case == "lean" else GRPOTrainer)(
        model=LlamaForCausalLM(LlamaConfig(**values)),
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a a a"] * 8}),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    if case == "beta":
        fake_rollout(trainer, Settings("tiny", prompt_length=3, completion_length=5, generation="none"))
    return trainer


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
