"""The rough math beside what was executed: formulas of :mod:`memprof.plan.rough`, and a simulation's own figures.

python -m benchmarks.rough_math            # simulate what is missing and print docs/planning.md's table
python -m benchmarks.rough_math --print    # simulate nothing
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "cpu" / "rough_math.json"
MODEL = "meta-llama/Llama-3.2-1B-Instruct"
_BASE = {"model": MODEL, "prompt_length": 256, "completion_length": 256, "beta": 0.04}
RUNS: dict[str, dict[str, Any]] = {
    "full, fp32, Adam": {"gradient_checkpointing": False},
    "full, bf16, 8-bit Adam, checkpointing": {"dtype": "bfloat16", "optim": "adamw_8bit"},
    "LoRA 16, bf16, checkpointing": {"dtype": "bfloat16", "lora_r": 16},
    "QLoRA 16, checkpointing": {"dtype": "bfloat16", "lora_r": 16, "load_in_4bit": True},
}


def executed(changes: dict[str, Any]) -> dict[str, Any]:
    """Formulas' bytes and the simulation's own peaks by category, for one run."""
    from memprof.config.catalogue import find_config
    from memprof.config.settings import Settings
    from memprof.plan.rough import rough, shape_of
    from memprof.simulate.fit import evaluate

    settings = Settings(**{**_BASE, **changes})
    analysis = evaluate(settings, None).analysis
    standing = max(
        (part for part in analysis.phases if part.phase == "optimizer_step"), key=lambda part: part.allocated_bytes
    )
    shown = {**{name: size for name, size in standing.categories.items() if size}}
    own = analysis.own_peaks
    return {
        "rough": rough(shape_of(find_config(settings.model)), settings),
        "optimizer_step": shown,
        "own_peaks": {
            name: own[name] for name in ("kv_cache", "activations", "weight_casts", "loss_logits") if name in own
        },
        "peak_bytes": analysis.peak.allocated_bytes,
        "reserved_bytes": analysis.device_peak.reserved_bytes if analysis.device_peak else 0,
    }


def compared(row: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Component, formula and executed bytes: standing ones when the optimizer steps, the others at their own peak."""
    found = []
    for name, size in row["rough"].items():
        there = {**row["own_peaks"], **row["optimizer_step"]}
        if name in ("kv_cache", "weight_casts"):
            there = row["own_peaks"]
        if size and name in there:
            found.append((name, size, there[name]))
    return found


def table(results: dict[str, Any]) -> str:
    """Markdown, GiB: on paper, executed."""
    names = ["weights", "adapters", "gradients", "optimizer_state", "reference_model", "weight_casts", "kv_cache"]
    lines = ["| GiB on paper / executed | " + " | ".join(name.replace("_", " ") for name in names) + " | peak |"]
    lines.append("|---|" + "--:|" * (len(names) + 1))
    for run, row in results.items():
        cells = {name: f"{paper / 2**30:.2f} / {there / 2**30:.2f}" for name, paper, there in compared(row)}
        shown = [cells.get(name, "–") for name in names]
        lines.append(f"| {run} | {' | '.join(shown)} | {row['peak_bytes'] / 2**30:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate what is missing, keep it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", dest="only_print")
    parser.add_argument("--only", action="append", choices=list(RUNS), help="a run; may be given more than once")
    asked = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name, changes in RUNS.items():
        if name not in results and not asked.only_print and name in (asked.only or RUNS):
            results[name] = executed(changes)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table({name: results[name] for name in RUNS if name in results}))


if __name__ == "__main__":
    main()
