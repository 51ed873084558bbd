"""Compare the estimates of advice with simulations of the changed runs, at full size on fake tensors.

    python -m benchmarks.advice simulated --out benchmarks/results/cpu/advice.json

A simulated prediction is its own execution; what is compared are the *estimates*, which know nothing but the unchanged
run's sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.advice.results import FIRST, ONLY, OUT, Rows, fill, row_of

_QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
SIMULATED: dict[str, dict[str, Any]] = {
    "Qwen2.5-1.5B, full with a reference, no checkpointing": {
        "model": _QWEN, "beta": 0.04, "gradient_checkpointing": False, "prompt_length": 256, "completion_length": 768,
    },
    "Qwen2.5-1.5B, full in bfloat16, checkpointing": {
        "model": _QWEN, "dtype": "bfloat16", "prompt_length": 256, "completion_length": 768,
    },
    "Qwen2.5-1.5B, LoRA in bfloat16, logits in full": {
        "model": _QWEN, "dtype": "bfloat16", "lora_r": 16, "recipe": "trl-full-logits", "prompt_length": 256,
        "completion_length": 768,
    },
    "Llama-3.1-8B, LoRA in bfloat16, checkpointing": {
        "model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "lora_r": 16, "prompt_length": 512,
        "completion_length": 3584,
    },
    "SmolLM2-135M, full, padded batches, no checkpointing": {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "gradient_checkpointing": False, "padding": "worst",
        "optim": "adamw_torch", "prompt_length": 128, "completion_length": 512,
    },
}  # fmt: skip


def simulated(machine: Any, first: int, wanted: Sequence[str], rows: Rows, keep: Callable[[Rows], None]) -> None:
    """Compare estimates from the unchanged runs' sizes (``first`` of each) with simulations."""
    from memprof.advice.estimate import Estimate, entry, estimate
    from memprof.advice.evaluate import run_of_row
    from memprof.advice.recorded_run import AdvisedRun
    from memprof.config.catalogue import find_config
    from memprof.config.model_shape import ModelShape
    from memprof.config.settings import Settings
    from memprof.errors import MemprofError

    def saving(found: Estimate) -> int:
        return -int(found.saves or 0)

    for name, values in SIMULATED.items():
        if wanted and not any(word in name for word in wanted):
            continue
        settings = Settings(**values)
        base = machine.run([settings])[0]
        run = run_of_row(base, AdvisedRun(peaks=(), shape=ModelShape.of(find_config(settings.model))), settings)
        found = [e for e in estimate(run) if e.candidate.changes and e.saves and not e.candidate.device]
        for place, e in enumerate(sorted(found, key=saving)[:first]):
            if any((r["run"], r["id"]) == (name, e.candidate.id) for r in rows):
                continue
            try:
                after = machine.run([settings.with_(**e.candidate.changes)])[0].peak_bytes
            except MemprofError as error:
                print(f"{name}: {e.candidate.id}: {error}", file=sys.stderr)
                continue
            before = base.peak_bytes
            rows.append(row_of(name, "simulated", entry(e, run), place, before, before, before - after))
            keep(rows)


@click.command(help=__doc__)
@ONLY
@click.option("--workers", default=1, show_default=True)
@FIRST
@OUT
def main(only: tuple[str, ...], workers: int, first: int, out: Path | None) -> None:
    from memprof.plan.subprocess_runner import runner

    with runner(None, workers=workers) as machine:
        fill("simulated", out, lambda rows, keep: simulated(machine, first, only, rows, keep))
