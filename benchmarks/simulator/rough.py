"""Compare formulas one can do on paper with a simulation's own figures.

python -m benchmarks.simulator rough            # simulate what is missing and print the table of measurements.md
python -m benchmarks.simulator rough --print    # simulate nothing

The formulas hold for decoders of the Llama family: grouped attention, gated feed-forward, tied or own output head.
Activations have no such formula; they are executed (``memprof simulate``).
"""

from __future__ import annotations

import json
from typing import Any

import click

from benchmarks import tabling
from memprof.config.model_shape import ModelShape
from memprof.config.optimizers import optimizer
from memprof.config.settings import Settings
from memprof.units import DTYPE_BYTES

RESULTS = tabling.RESULTS / "rough_math.json"
MODEL = "meta-llama/Llama-3.2-1B-Instruct"
_BASE = {"model": MODEL, "prompt_length": 256, "completion_length": 256, "beta": 0.04}
RUNS: dict[str, dict[str, Any]] = {
    "full, fp32, Adam": {"gradient_checkpointing": False},
    "full, bf16, 8-bit Adam, checkpointing": {"dtype": "bfloat16", "optim": "adamw_8bit"},
    "LoRA 16, bf16, checkpointing": {"dtype": "bfloat16", "lora_r": 16},
    "QLoRA 16, checkpointing": {"dtype": "bfloat16", "lora_r": 16, "load_in_4bit": True},
}


def rough(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """Reckon the bytes of each component that a formula gives, for one GPU; those that are not there are left out.

    Weights in ``dtype``; a gradient as wide as its parameter (an adapter is fp32, on 4-bit layers bf16); the
    optimizer's state as its row in :mod:`memprof.config.optimizers` says; bf16 copies of fp32 linear weights and of
    the head, all at once without checkpointing; keys and values of all but the last token, as wide as the weights;
    ``logits`` is one bf16 copy of [sequences, completion + 1, vocabulary]: TRL's older loss held several, 1.16 never
    makes it.
    """
    width = DTYPE_BYTES[settings.dtype]
    head = shape.vocabulary * shape.hidden
    found = {"kv_cache": _cache(shape, settings), "logits": _logits(shape, settings)}
    found["weights"] = _weights(shape, settings, width)
    kind = optimizer(settings.optim)
    if settings.lora_r is not None:
        trained, held = shape.adapter_parameters(settings.lora_r), 2 if settings.load_in_4bit else 4
        found["adapters"] = found["gradients"] = held * trained
        found["optimizer_state"] = kind.state_bytes(trained, held)
    else:
        found["gradients"] = width * shape.parameters
        exact = shape.norms_and_biases + (head if kind.exact_embeddings else 0)
        found["optimizer_state"] = kind.state_bytes(shape.parameters, width, exact)
        if settings.beta:
            found["reference_model"] = found["weights"]
    if settings.dtype == "float32" and settings.mixed_precision == "bf16" and not settings.gradient_checkpointing:
        found["weight_casts"] = 2 * (shape.matrices + head)
    return found


def _weights(shape: ModelShape, settings: Settings, width: int) -> int:
    if not settings.load_in_4bit:
        return width * shape.parameters
    # NF4: half a byte a value and an fp32 scale for each block of 64; embeddings, head and norms as they are.
    packed = shape.matrices // 2 + 4 * (shape.matrices // 64)
    return packed + width * (shape.embeddings + shape.norms_and_biases)


def _cache(shape: ModelShape, settings: Settings) -> int:
    if settings.generation != "hf":
        return 0
    sequences = settings.per_device_train_batch_size * settings.generation_steps
    return sequences * shape.kv_cache_bytes(settings.sequence_length - 1, DTYPE_BYTES[settings.dtype])


def _logits(shape: ModelShape, settings: Settings) -> int:
    if settings.recipe not in ("trl-full-logits", "trl-0.14"):
        return 0
    return 2 * settings.per_device_train_batch_size * (settings.completion_length + 1) * shape.vocabulary


def executed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return formulas' bytes and the simulation's own peaks by category, for one run."""
    from memprof.config.catalogue import find_config
    from memprof.simulate.evaluate import evaluate

    settings = Settings(**{**_BASE, **changes})
    analysis = evaluate(settings, None).analysis
    standing = max(
        (part for part in analysis.phases if part.phase == "optimizer_step"), key=lambda part: part.allocated_bytes
    )
    shown = {**{name: size for name, size in standing.categories.items() if size}}
    own = analysis.own_peaks
    return {
        "rough": rough(ModelShape.of(find_config(settings.model)), settings),
        "optimizer_step": shown,
        "own_peaks": {
            name: own[name] for name in ("kv_cache", "activations", "weight_casts", "loss_logits") if name in own
        },
        "peak_bytes": analysis.peak.allocated_bytes,
        "reserved_bytes": analysis.device_peak.reserved_bytes if analysis.device_peak else 0,
    }


def compared(row: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Return component, formula and executed bytes: standing ones when the optimizer steps, others at their peak."""
    found = []
    for name, size in row["rough"].items():
        there = {**row["own_peaks"], **row["optimizer_step"]}
        if name in ("kv_cache", "weight_casts"):
            there = row["own_peaks"]
        if size and name in there:
            found.append((name, size, there[name]))
    return found


def table(results: dict[str, Any]) -> str:
    """Make a Markdown table, GiB: on paper, executed."""
    names = ["weights", "adapters", "gradients", "optimizer_state", "reference_model", "weight_casts", "kv_cache"]
    lines = ["| GiB: formula / simulated | " + " | ".join(name.replace("_", " ") for name in names) + " | peak |"]
    lines.append("|---|" + "--:|" * (len(names) + 1))
    for run, row in results.items():
        cells = {name: f"{paper / 2**30:.2f} / {there / 2**30:.2f}" for name, paper, there in compared(row)}
        shown = [cells.get(name, "–") for name in names]
        lines.append(f"| {run} | {' | '.join(shown)} | {row['peak_bytes'] / 2**30:.2f} |")
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.option("--print", "only_print", is_flag=True, help="Simulate nothing.")
@click.option("--only", multiple=True, type=click.Choice(list(RUNS)), metavar="RUN", help=f"Of {'; '.join(RUNS)}.")
def main(only_print: bool, only: tuple[str, ...]) -> None:
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name, changes in RUNS.items():
        if name not in results and not only_print and name in (only or RUNS):
            results[name] = executed(changes)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table({name: results[name] for name in RUNS if name in results}))
