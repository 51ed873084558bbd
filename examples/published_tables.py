"""Published VRAM tables of GRPO and SFT, simulated: ours beside theirs, from one command each.

    python examples/published_tables.py methods              # methods and sizes on one H100
    python examples/published_tables.py components           # Llama-3.1-8B, 20K tokens, 8 generations, by component
    python examples/published_tables.py sft                  # supervised fine-tuning of three trainers
    python examples/published_tables.py methods --print      # what was simulated before, nothing run

Results go to ``--results`` (benchmarks/results/cpu) as they come, and what is there is not run again.

``methods``: peak GB of the first hundred steps on an H100 80 GB, bf16, flash attention, prompts of 256 and completions
of 786 tokens, one prompt with its four completions in a micro-batch (which ran on TRL 0.14 alone), accumulation 4, LoRA
of rank 16. How long the completions really were was not published: ours have their full length, and agreement within
some gigabytes is what can be asked.

``components``: what was published are sums of components, not measured peaks; the parts need not peak together. Ours
are each component's own peak, their sum, and what the run really holds at once.

``sft``: what other trainers, or older releases of TRL, published of one GPU. What a row's source leaves open stands
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "cpu"
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
# The loss of the release that the table was measured with, and of the releases after it.
RECIPE, LATER = "trl-0.14", "trl-full-logits"
# Peak GB as published; None is an out-of-memory error.
PUBLISHED: dict[str, list[int | None]] = {
    "full": [25, 38, 58, None, None],
    "full + 8-bit Adam": [16, 26, 52, None, None],
    "full + 8-bit Adam + checkpointing": [15, 24, 41, 72, None],
    "LoRA": [13, 16, 32, 58, 69],
}
# GiB as published (there called GB): training memory, GRPO memory, inference cost, keys and values of one sequence,
# total. 78.3 is two models' bf16 logits of 8 x 20480 tokens in units of 2**30.
COMPONENTS = {"Unsloth": (42, 9.8, 0, 2.5, 54.3), "TRL with flash attention 2": (414, 78.3, 16, 2.5, 510.8)}
LONG: dict[str, dict[str, Any]] = {
    "TRL 1.16, 8 in a micro-batch": {"recipe": "trl"},
    "TRL's older loss, 8 in a micro-batch": {"recipe": "trl-full-logits"},
    "TRL 1.16, 1 in a micro-batch, accumulated": {
        "recipe": "trl", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
    },
    "lean trainer on 24 GB, 8 in a micro-batch": {"recipe": "lean"},
}  # fmt: skip
_LLAMA = {"model": MODELS["8B"], "trainer": "sft", "dtype": "bfloat16"}
_TUNE: dict[str, Any] = {
    **_LLAMA,
    "lora_r": 8,
    "lora_target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "per_device_train_batch_size": 2,
    "max_length": 2048,
}
_QTUNE = {**_TUNE, "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
_SOUP: dict[str, Any] = {
    **_LLAMA,
    "dtype": "float32",
    "recipe": "trl-full-logits",
    "lora_r": 16,
    "lora_target_modules": ("q_proj", "v_proj"),
    "lora_dropout": 0.05,
    "per_device_train_batch_size": 4,
    "max_length": 1024,
    "gradient_checkpointing": False,
}
_AXOLOTL: dict[str, Any] = {
    "model": "Qwen/Qwen3-8B",
    "trainer": "sft",
    "dtype": "bfloat16",
    "per_device_train_batch_size": 1,
    "max_length": 16_384,
    "optim": "adamw_8bit",
    "gradient_accumulation_steps": 2,
}
# Row: source, card, which peak, bytes as published, settings, and what is to be known of them.
SFT: dict[str, tuple[str, str, str, float, dict[str, Any], str]] = {
    "torchtune, QLoRA": ("[1]", "4090", "allocated", 7.4 * 2**30, _QTUNE, ""),
    "torchtune, LoRA, inputs offloaded": (
        "[1]", "4090", "allocated", 16.2 * 2**30, {**_TUNE, "gradient_checkpointing": "offloaded"},
        "offloading is not stated",
    ),
    "torchtune, LoRA, not offloaded": ("[1]", "4090", "allocated", 16.2 * 2**30, _TUNE, "the other reading"),
    "TRL 0.26 under Soup, LoRA": ("[2]", "H100", "reserved", 70.99 * 2**30, _SOUP, ""),
    "the same with the base in bfloat16": (
        "[2]", "H100", "reserved", 70.99 * 2**30, {**_SOUP, "dtype": "bfloat16"}, "what *bf16* seems to say",
    ),
    "Axolotl, full, 8-bit Adam, accumulated": (
        "[3]", "H100", "allocated", 63.3 * 10**9, _AXOLOTL, "optimizer and accumulation are not stated",
    ),
    "the same with inputs offloaded": (
        "[3]", "H100", "allocated", 58.9 * 10**9, {**_AXOLOTL, "gradient_checkpointing": "offloaded"}, "nor here",
    ),
}  # fmt: skip
# A card that a column is simulated on: the lean trainer generates as many sequences at once as its memory has room for.
CARDS = {"lean trainer on 24 GB, 8 in a micro-batch": "24GB"}


def settings_of(model: str, method: str) -> Any:
    """A cell of the first table, as far as it is known."""
    from memprof.config.settings import Settings

    return Settings(
        model=model,
        dtype="bfloat16",
        recipe=RECIPE,
        per_device_train_batch_size=4,
        num_generations=4,
        gradient_accumulation_steps=4,
        steps_per_generation=1,  # every micro-batch generated its own
        prompt_length=256,
        completion_length=786,
        beta=0.04,
        **METHODS[method],
    )


def long_settings(name: str) -> Any:
    """A column of the second table: LoRA on all linear layers, bf16, checkpointing, 512 + 19 968 tokens."""
    from memprof.config.settings import Settings

    values = {"per_device_train_batch_size": 8, **LONG[name]}
    return Settings(
        model=MODELS["8B"], dtype="bfloat16", lora_r=16, num_generations=8, prompt_length=512,
        completion_length=19_968, **values,
    )  # fmt: skip


def kept(file: Path) -> dict[str, Any]:
    """What was simulated before."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def keep(file: Path, results: dict[str, Any]) -> None:
    """Write them, complete or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(part, file)


def run_methods(file: Path, sizes: list[str], workers: int | None) -> None:
    """Simulate what is missing, size by size."""
    from memprof.plan.subprocess_runner import runner

    results = kept(file)
    with runner("H100", workers=workers) as machine:
        for size in sizes:
            missing = [method for method in METHODS if _recipe(results.get(f"{method}|{size}")) != RECIPE]
            for method in missing:
                row = machine.run([settings_of(MODELS[size], method)])[0]
                names = ("fits", "peak_bytes", "device_peak_bytes", "largest_category", "peak_phase")
                results[f"{method}|{size}"] = {"recipe": RECIPE, **{name: getattr(row, name) for name in names}}
                keep(file, results)


def _recipe(row: dict[str, Any] | None) -> str | None:
    """The loss a kept cell was simulated with; the first ones kept do not say."""
    return None if row is None else row.get("recipe", LATER)


def run_components(file: Path) -> None:
    """Simulate what is missing; each group's own peak, as the published sums are made."""
    from memprof.config.gpus import find_gpu
    from memprof.simulate.evaluate import evaluate

    results = kept(file)
    for name in LONG:
        if name not in results:
            card = CARDS.get(name)
            analysis = evaluate(long_settings(name), find_gpu(card) if card else None).analysis
            peak = analysis.device_peak
            results[name] = {
                "own_peaks": analysis.group_own_peaks,
                "peak_bytes": analysis.peak.allocated_bytes,
                "reserved_bytes": peak.reserved_bytes if peak else None,
                "peak_phase": analysis.peak.phase,
                "at_peak": analysis.peak.groups,
            }
            keep(file, results)


def run_sft(file: Path) -> None:
    """Simulate what is missing."""
    from memprof.config.gpus import find_gpu
    from memprof.config.settings import Settings
    from memprof.simulate.run import simulate_settings

    results = kept(file)
    for name, (_, card, _, _, settings, _) in SFT.items():
        if name not in results:
            highest = simulate_settings(Settings(**settings), gpu=find_gpu(card), stacks=False)["memprof"]["highest"]
            results[name] = {"allocated": highest["allocated_bytes"], "reserved": highest["reserved_bytes"]}
            keep(file, results)


def sft_table(results: dict[str, Any]) -> str:
    """Markdown, GiB: published and simulated, and the signed error."""
    lines = ["| SFT of an 8B on one GPU | source | published | simulated | error | |", "|---|---|--:|--:|--:|---|"]
    for name, (source, _, what, published, _, remark) in SFT.items():
        if name in results:
            ours = results[name][what]
            error = f"{100 * (ours / published - 1):+.1f}%".replace("-", "−")
            lines.append(f"| {name} | {source} | {published / 2**30:.2f} | {ours / 2**30:.2f} | {error} | {remark} |")
    return "\n".join(lines) + "\n"


def methods_table(results: dict[str, Any]) -> str:
    """Markdown: simulated GB, published in brackets; a star where the later releases' loss was simulated."""
    lines = [f"| peak GB, simulated (published) | {' | '.join(MODELS)} |", f"|---|{'--:|' * len(MODELS)}"]
    for method, published in PUBLISHED.items():
        cells = []
        for size, theirs in zip(MODELS, published, strict=True):
            row = results.get(f"{method}|{size}")
            star = "*" if _recipe(row) == LATER else ""
            ours = "–" if row is None else f"{row['device_peak_bytes'] / 1e9:.1f}{star}{'' if row['fits'] else ', OOM'}"
            cells.append(f"{ours} ({theirs if theirs is not None else 'OOM'})")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def components_table(results: dict[str, Any]) -> str:
    """Markdown, GiB: the published sums, each group's own peak in ours, and the highest that is held at one instant."""
    groups = ("training", "grpo_loss", "inference", "kv_cache")
    lines = [
        "| GiB, per-category peaks | training | GRPO loss | inference | KV cache | sum | at once | reserved |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *(f"| {name}, published | {' | '.join(map(str, sizes))} | – | – |" for name, sizes in COMPONENTS.items()),
    ]
    for name in LONG:
        if name not in results:
            continue
        row = results[name]
        own = [row["own_peaks"][group] for group in groups]
        figures = [*own, sum(own), row["peak_bytes"], row["reserved_bytes"]]
        lines.append(f"| {name} | {' | '.join(f'{size / 2**30:.1f}' for size in figures)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate a table, as far as it is not there, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["methods", "components", "sft"])
    parser.add_argument("--sizes", default=",".join(MODELS), help="of the first table")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--print", action="store_true", dest="only_print", help="simulate nothing")
    asked = parser.parse_args()
    file = asked.results / f"published_{asked.table}.json"
    if not asked.only_print and asked.table == "methods":
        run_methods(file, asked.sizes.split(","), asked.workers)
    elif not asked.only_print:
        (run_components if asked.table == "components" else run_sft)(file)
    tables = {"methods": methods_table, "components": components_table, "sft": sft_table}
    print(tables[asked.table](kept(file)))


if __name__ == "__main__":
    main()
