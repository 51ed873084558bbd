"""The published VRAM table of GRPO methods and sizes, simulated: ours beside theirs.

    python examples/published_tables.py [--sizes 0.5B,1B] [--workers 2]

The published figures are the peak of the first hundred steps on one H100 80 GB, with TRL of early 2025: bf16, flash
attention, prompts of 256 and completions of 786 tokens, one prompt with its four completions in a micro-batch,
accumulation 4, LoRA of rank 16. The configurations were not published in full, and what they say of themselves differs
from their repository in places: agreement within some gigabytes is what can be asked.
"""

from __future__ import annotations

import argparse
from typing import Any

from memprof.plan.runner import runner
from memprof.simulate.settings import Settings

MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1B": "meta-llama/Llama-3.2-1B-Instruct",
    "3B": "meta-llama/Llama-3.2-3B-Instruct",
    "8B": "meta-llama/Llama-3.1-8B-Instruct",
    "14B": "Qwen/Qwen2.5-14B-Instruct",
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"optim": "adamw_torch", "gradient_checkpointing": False},
    "full + 8-bit Adam": {"optim": "adamw_8bit", "gradient_checkpointing": False},
    "full + 8-bit Adam + checkpointing": {"optim": "adamw_8bit", "gradient_checkpointing": True},
    "LoRA": {
        "optim": "adamw_torch",
        "gradient_checkpointing": False,
        "lora_r": 16,
        "lora_target_modules": ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj"),
    },
}
# Peak GB as published; None is an out-of-memory error.
PUBLISHED: dict[str, list[int | None]] = {
    "full": [25, 38, 58, None, None],
    "full + 8-bit Adam": [16, 26, 52, None, None],
    "full + 8-bit Adam + checkpointing": [15, 24, 41, 72, None],
    "LoRA": [13, 16, 32, 58, 69],
}


def settings_of(model: str, method: str) -> Settings:
    """The published run, as far as it is known."""
    return Settings(
        model=model,
        dtype="bfloat16",
        recipe="trl-full-logits",
        per_device_train_batch_size=4,
        num_generations=4,
        gradient_accumulation_steps=4,
        prompt_length=256,
        completion_length=786,
        beta=0.04,
        **METHODS[method],
    )


def main() -> None:
    """Simulate the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default=",".join(MODELS))
    parser.add_argument("--workers", type=int, default=None)
    arguments = parser.parse_args()
    sizes = arguments.sizes.split(",")
    cells = [(method, size) for method in METHODS for size in sizes]
    with runner("H100", workers=arguments.workers) as machine:
        rows = machine.run([settings_of(MODELS[size], method) for method, size in cells])
    found = dict(zip(cells, rows, strict=True))
    print(f"| peak GB, simulated (published) | {' | '.join(sizes)} |")
    print(f"|---|{'--:|' * len(sizes)}")
    for method in METHODS:
        words = []
        for size in sizes:
            row, published = found[method, size], PUBLISHED[method][list(MODELS).index(size)]
            ours = f"{row['device_peak_bytes'] / 1e9:.1f}" if row["fits"] else "OOM"
            words.append(f"{ours} ({published if published is not None else 'OOM'})")
        print(f"| {method} | {' | '.join(words)} |")


if __name__ == "__main__":
    main()
