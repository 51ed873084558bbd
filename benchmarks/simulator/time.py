"""Hold estimated times against published ones, by ratio: decode rates, and what checkpointing costs.

    python -m benchmarks.simulator time [--only decode|checkpointing|ratios] [--json benchmarks/results/cpu/time.json]

The decode rates are of Qwen2.5 on an A100-80GB, batch 1, bf16, 2,048 tokens from an empty prompt (Qwen's speed
benchmark: transformers 4.46 with flash-attention, vLLM 0.6.3). The estimate's two constants of the host were set by the
0.5B rows; the others are predictions. No second here is a promise: launches cost what the host's CPU makes of them.

The ratios are of two published runs that differ in one thing: checkpointing, LoRA, the loss, the micro-batch. Rows of
Liger need its package (pip install liger-kernel), and run its loss without torch.compile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Ratio:
    """Two published times for the same tokens, and the settings that make them; ``much`` over ``little``."""

    what: str
    published: float
    source: str
    model: str
    gpu: str
    much: dict[str, Any]
    little: dict[str, Any]


# Tokens a second of torchtune's table "Optimization flags" (Llama 3.2 3B on an A100, 2 x 4096 packed tokens, bf16,
# compiled), and seconds for 1,024 sequences (2,048 tokens) of a loop of forward and backward on an H200.
_TORCHTUNE = "https://github.com/meta-pytorch/torchtune/blob/main/README.md#optimization-flags"
_MDY = "https://github.com/mdy666/mdy_triton/blob/main/triton_kernels/grpo/infos.jsonl"
_SFT = {"trainer": "sft", "max_length": 4096, "per_device_train_batch_size": 2}
_LOOP: dict[str, Any] = {
    "generation": "none", "optim": "none", "gradient_checkpointing": False, "prompt_length": 100,
    "completion_length": 2048,
}  # fmt: skip
_ONE = {**_LOOP, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_generations": 2}
_EIGHT = {**_LOOP, "per_device_train_batch_size": 8, "num_generations": 8}
_LLAMA = ("meta-llama/Llama-3.2-3B", "A100-80GB")
_QWEN = ("Qwen/Qwen2.5-1.5B", "H200")
_FULL, _LIGER = {"recipe": "trl-full-logits"}, {"recipe": "liger"}
RATIOS = (
    Ratio(
        "checkpointing / none, full", 9174 / 7210, _TORCHTUNE, *_LLAMA, _SFT, {**_SFT, "gradient_checkpointing": False}
    ),
    Ratio("LoRA / full, both checkpointed", 7210 / 8210, _TORCHTUNE, *_LLAMA, {**_SFT, "lora_r": 8}, _SFT),
    Ratio("1 sequence at a time / 8", 77.737 / 58.667, _MDY, *_QWEN, {**_ONE, **_FULL}, {**_EIGHT, **_FULL}),
    Ratio("Liger's loss / logits in full, 8", 61.371 / 58.667, _MDY, *_QWEN, {**_EIGHT, **_LIGER}, {**_EIGHT, **_FULL}),
    Ratio("Liger's loss / logits in full, 1", 81.901 / 77.737, _MDY, *_QWEN, {**_ONE, **_LIGER}, {**_ONE, **_FULL}),
)
_TRAINING = ("forward", "backward", "optimizer_step")


def ratios(decode: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare ratios of published times with those of estimated ones; vLLM's are of the decode rates."""
    known: dict[str, float] = {}

    def sequence(row: Ratio, changes: dict[str, Any]) -> float:
        key = repr((row.model, row.gpu, changes))
        if key not in known:
            phases = seconds_of(row.model, row.gpu, **changes)
            rows = changes["per_device_train_batch_size"] * changes.get("gradient_accumulation_steps", 1)
            known[key] = sum(phases[name] for name in _TRAINING) / rows
        return known[key]

    found = [
        {
            "what": row.what, "published": round(row.published, 3), "source": row.source,
            "estimated": round(sequence(row, row.much) / sequence(row, row.little), 3),
        }
        for row in RATIOS
    ]  # fmt: skip
    rates = {(row["model"], row["engine"]): row for row in decode}
    return found + [
        {
            "what": f"vLLM / transformers, tokens/s, Qwen2.5-{size}", "source": _QWEN_RATES,
            **{n: round(rates[size, "vllm"][n] / rates[size, "hf"][n], 3) for n in ("published", "estimated")},
        }
        for size in RATES
    ]  # fmt: skip


_QWEN_RATES = "https://github.com/QwenLM/Qwen2.5/blob/main/docs/source/benchmark/speed_benchmark.rst"


@click.command(help=__doc__)
@click.option("--only", type=click.Choice(["decode", "checkpointing", "ratios"]), help="Measure this part again.")
@click.option("--json", "path", type=click.Path(path_type=Path), default=RESULTS / "time.json")
def main(path: Path, only: str | None) -> None:
    """Estimate, compare and write down; what is not measured again stays as the file has it."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if only and path.exists() else {}
    if only in (None, "decode"):
        data["decode"] = decode_rates()
    if only in (None, "checkpointing"):
        data["checkpointing"] = checkpointing()
    if only in (None, "ratios"):
        data["ratios"] = ratios(data["decode"])
    data["environment"] = environment()
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    rows = data.get("decode", [])
    cells = [(r["model"], r["engine"], r["published"], r["estimated"], r["estimated"] / r["published"]) for r in rows]
    print(table(["Qwen2.5", "engine", "published, tokens/s", "estimated", "ratio"], cells))
    print(f"forward and backward with checkpointing / without, 7B on an H100: {data.get('checkpointing')}")
    held = [
        (r["what"], r["published"], r["estimated"], r["estimated"] / r["published"]) for r in data.get("ratios", [])
    ]
    print(table(["ratio of times", "published", "estimated", "estimated / published"], held))
