"""Hold estimated times against published ones, by ratio: decode rates, and what checkpointing costs.

    python -m benchmarks.simulator time [--json benchmarks/results/cpu/time.json]

The decode rates are of Qwen2.5 on an A100-80GB, batch 1, bf16, 2,048 tokens from an empty prompt (Qwen's speed
benchmark: transformers 4.46 with flash-attention, vLLM 0.6.3). The estimate's two constants of the host were set by the
0.5B rows; the others are predictions. No second here is a promise: launches cost what the host's CPU makes of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import environment
from benchmarks.tabling import RESULTS, table

# Tokens a second: transformers, vLLM. Source: docs/source/benchmark/speed_benchmark.rst of QwenLM/Qwen2.5.
RATES = {"0.5B": (47.40, 311.55), "1.5B": (39.68, 183.33), "14B": (24.74, 46.30)}
TOKENS, TOGETHER = 2048, 2


def seconds_of(model: str, gpu: str, **changes: Any) -> dict[str, float]:
    """Estimate the phases of one step, seconds."""
    from memprof.config.gpus import find_gpu
    from memprof.config.settings import Settings
    from memprof.simulate.run import simulate_settings

    settings = Settings(model=model, dtype="bfloat16", **changes)
    raw = simulate_settings(settings, gpu=find_gpu(gpu), stacks=False)
    phases: dict[str, float] = raw["memprof"]["estimated_time"]["phases"]
    return phases


def decode_rates() -> list[dict[str, Any]]:
    """Compare tokens a second of one sequence; two decode together, which costs what one does here."""
    rows = []
    shape: dict[str, Any] = {
        "prompt_length": 1,
        "completion_length": TOKENS,
        "num_generations": TOGETHER,
        "per_device_train_batch_size": TOGETHER,
        "vllm_gpu_memory_utilization": 0.9,  # room for both beside the weights
    }
    for size, published in RATES.items():
        for engine, rate in zip(("hf", "vllm"), published, strict=True):
            estimated = TOKENS / seconds_of(f"Qwen/Qwen2.5-{size}", "A100-80GB", generation=engine, **shape)["generate"]
            rows.append({"model": size, "engine": engine, "published": rate, "estimated": round(estimated, 2)})
    return rows


def checkpointing() -> dict[str, float]:
    """Return what recomputing activations makes of forward and backward, full and LoRA."""
    found = {}
    for name, changes in {"full": {}, "LoRA": {"lora_r": 16}}.items():
        took = []
        for kept in (False, True):
            phases = seconds_of(
                "Qwen/Qwen2.5-7B", "H100", generation="none", gradient_checkpointing=kept, prompt_length=256,
                completion_length=1024, num_generations=4, per_device_train_batch_size=4, **changes,
            )  # fmt: skip
            took.append(phases["forward"] + phases["backward"])
        found[name] = round(took[1] / took[0], 3)
    return found


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(path_type=Path), default=RESULTS / "time.json")
def main(path: Path) -> None:
    """Estimate, compare and write down."""
    rows, ratios = decode_rates(), checkpointing()
    cells = [(r["model"], r["engine"], r["published"], r["estimated"], r["estimated"] / r["published"]) for r in rows]
    print(table(["Qwen2.5", "engine", "published, tokens/s", "estimated", "ratio"], cells))
    print(f"forward and backward with checkpointing / without, 7B on an H100: {ratios}")
    data = {"decode": rows, "checkpointing": ratios, "environment": environment()}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
